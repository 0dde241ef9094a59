// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/collective/broadcast_object.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/nccl/bootstrap.hpp>

namespace bluefog::nccl {

/// The ranks of another communicator, e.g. of one over MPI; it is needed for this call only.
///
///     communicator<mpi_backend> over_mpi(some_mpi_comm);
///     communicator<nccl_backend> comm(nccl::meet_over(over_mpi));
///
/// Collective over `comm`. \throws timeout_error if rank 0's host cannot be reached.
template <backend Backend>
[[nodiscard]] meeting meet_over(communicator<Backend>& comm) {
  meeting made{.rank = comm.rank(), .size = comm.size(), .words = nullptr};
  std::unique_ptr<board_server> home;
  std::string address;
  if (made.rank == 0) {
    home = std::make_unique<board_server>(std::uint16_t{0});
    address = detail::board_address(*home);
  }
  address = broadcast_object(comm, address, 0);
  made.words = home ? detail::open_board(std::move(home))
                    : detail::reach_board([&] { return detail::place_in(address); }, made.timeout,
                                          "the communicator that was given");
  return made;
}

}  // namespace bluefog::nccl
