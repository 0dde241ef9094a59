// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <bluefog/communicator.hpp>
#include <bluefog/mpi.hpp>
#include <bluefog/thread.hpp>

namespace example {

/// Calls `body(comm)` on every rank.
///
/// \param backend  "threads": this process has `ranks` of them; else it is one of those that a
///                 launcher has started.
template <class Body>
void run_ranks(const std::string& backend, int ranks, const Body& body) {
  if (backend == "threads") {
    bluefog::run_threads(ranks, body);
  } else {
    bluefog::communicator<bluefog::mpi_backend> comm;
    body(comm);
  }
}

}  // namespace example
