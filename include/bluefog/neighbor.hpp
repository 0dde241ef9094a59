// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: operations of every rank with its neighbours.
#include <bluefog/neighbor/allgather.hpp>
#include <bluefog/neighbor/allreduce.hpp>
