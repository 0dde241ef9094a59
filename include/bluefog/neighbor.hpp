// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: operations of every rank with its neighbours.
#include <bluefog/neighbor/allgather.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/allreduce_arrays.hpp>
#include <bluefog/neighbor/folding.hpp>
#include <bluefog/neighbor/hierarchical_allreduce.hpp>
#include <bluefog/neighbor/inference.hpp>
#include <bluefog/neighbor/pair_gossip.hpp>
