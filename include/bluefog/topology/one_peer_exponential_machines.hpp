// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/machines.hpp>
#include <bluefog/topology/one_peer_exponential.hpp>

namespace bluefog::topology {

/// `one_peer_exponential` among machines, for `hierarchical_neighbor_allreduce`.
///
/// Its size is the number of machines, and its ranks are machine ranks. With one machine, rounds
/// are empty.
class one_peer_exponential_machines : public one_peer_exponential {
 public:
  constexpr one_peer_exponential_machines() : one_peer_exponential_machines(1, 1) {}

  /// \param size        the number of ranks of all machines, a multiple of `local_size`.
  /// \param local_size  the number of ranks of each machine; at least 1.
  /// \throws usage_error otherwise.
  constexpr one_peer_exponential_machines(int size, int local_size)
      : one_peer_exponential(
            expect_equal_machines(size, local_size, 1, "one_peer_exponential_machines")
                .machines()) {}

  bool operator==(const one_peer_exponential_machines&) const = default;
};

static_assert(schedule<one_peer_exponential_machines>);

}  // namespace bluefog::topology
