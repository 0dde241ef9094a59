// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: operations of every rank with every rank.
#include <bluefog/collective/allgather.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/collective/any_of.hpp>
#include <bluefog/collective/barrier.hpp>
#include <bluefog/collective/broadcast.hpp>
#include <bluefog/collective/broadcast_object.hpp>
