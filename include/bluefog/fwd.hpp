// SPDX-License-Identifier: Apache-2.0
#pragma once

// The names of what a user's header may mention without using it: concepts whole, classes declared.
// Knows nothing of MPI or libtorch.

#include <concepts>
#include <type_traits>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/dtype.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/topology/concepts.hpp>

namespace bluefog {

template <backend Backend>
class communicator;

template <class Value>
  requires std::movable<Value> || std::is_void_v<Value>
class request;

struct communicator_options;
struct statistics;

class thread_backend;
class mpi_backend;
class nccl_backend;

namespace topology {

class exponential;
class symmetric_exponential;
class ring;
class mesh_grid_2d;
class star;
class fully_connected;
class adjacency;

template <graph Graph>
class one_peer;
template <graph Graph>
class repeat;

class one_peer_exponential;
class one_peer_exponential_machines;
class inner_outer_ring;
class inner_outer_exponential;

}  // namespace topology

}  // namespace bluefog
