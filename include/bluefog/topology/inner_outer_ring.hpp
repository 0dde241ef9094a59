// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/machines.hpp>
#include <bluefog/topology/pairing.hpp>
#include <bluefog/topology/rounds.hpp>

namespace bluefog::topology {

/// Who sends to whom in one round of `inner_outer_ring`.
struct inner_outer_ring_rule {
  equal_machines layout{};
  int outgoing = 0;  ///< the local rank that talks to other machines

  [[nodiscard]] constexpr int size() const noexcept { return layout.size; }
  [[nodiscard]] constexpr int destination(int rank) const noexcept { return other(rank, 1); }
  [[nodiscard]] constexpr int source(int rank) const noexcept { return other(rank, -1); }

  bool operator==(const inner_outer_ring_rule&) const = default;

 private:
  /// The next rank in `direction` on the ring that `rank` is part of.
  [[nodiscard]] constexpr int other(int rank, int direction) const noexcept {
    const int count = layout.machines();
    const int inside = layout.local_size;
    const int machine = layout.machine(rank);
    const int local = layout.local(rank);
    if (local == outgoing) return layout.rank((machine + direction + count) % count, local);
    const int next = (local + direction + inside) % inside;
    return layout.rank(machine, next == outgoing ? (next + direction + inside) % inside : next);
  }
};

/// In round k, local rank k mod L of each machine passes on to the next machine, while the others
/// pass on in a ring inside their machine.
///
/// Every rank sends and receives once per round, with weights 1/2; on a single machine the
/// outgoing rank is silent and keeps its value with weight 1.
class inner_outer_ring {
 public:
  constexpr inner_outer_ring() : inner_outer_ring(3, 3) {}

  /// \param size        the number of ranks, a multiple of `local_size`.
  /// \param local_size  L, the number of ranks of each machine; at least 3.
  /// \throws usage_error otherwise.
  constexpr inner_outer_ring(int size, int local_size)
      : layout_(expect_equal_machines(size, local_size, 3, "inner_outer_ring")) {}

  [[nodiscard]] constexpr int size() const noexcept { return layout_.size; }
  [[nodiscard]] constexpr int local_size() const noexcept { return layout_.local_size; }

  /// \return the graph of round `k`. Costs O(1). \throws usage_error if `k` is negative.
  [[nodiscard]] constexpr pairing<inner_outer_ring_rule> round(std::ptrdiff_t k) const {
    return pairing(inner_outer_ring_rule{layout_, round_in_period(k, local_size())});
  }

  /// \return what `rank` does in rounds 0, 1, 2, ...: an endless view.
  [[nodiscard]] constexpr auto rounds(int rank) const { return rounds_of(*this, rank); }

  bool operator==(const inner_outer_ring&) const = default;

 private:
  equal_machines layout_;
};

static_assert(schedule<inner_outer_ring>);

}  // namespace bluefog::topology
