// SPDX-License-Identifier: Apache-2.0
#pragma once

// Umbrella: the operations on at::Tensor.

#include <bluefog/tensor/allgather.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/autograd_node.hpp>
#include <bluefog/tensor/broadcast.hpp>
#include <bluefog/tensor/dtype.hpp>
#include <bluefog/tensor/hierarchical_neighbor_allreduce.hpp>
#include <bluefog/tensor/neighbor_allgather.hpp>
#include <bluefog/tensor/neighbor_allreduce.hpp>
#include <bluefog/tensor/pair_gossip.hpp>
#include <bluefog/tensor/parameters.hpp>
#include <bluefog/tensor/threads.hpp>
