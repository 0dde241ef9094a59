// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>

#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/machines.hpp>
#include <bluefog/topology/pairing.hpp>
#include <bluefog/topology/rounds.hpp>

namespace bluefog::topology {

/// Who sends to whom in one round of `inner_outer_exponential`.
struct inner_outer_exponential_rule {
  equal_machines layout{};
  int outgoing = 0;        ///< the local rank that talks to other machines
  int outer_distance = 0;  ///< how many machines on it sends; 0 with a single machine
  int inner_distance = 1;  ///< how many local ranks on the others send, `outgoing` left out

  [[nodiscard]] constexpr int size() const noexcept { return layout.size; }
  [[nodiscard]] constexpr int destination(int rank) const noexcept { return other(rank, 1); }
  [[nodiscard]] constexpr int source(int rank) const noexcept { return other(rank, -1); }

  bool operator==(const inner_outer_exponential_rule&) const = default;

 private:
  /// The rank at this round's distance from `rank` in `direction`.
  [[nodiscard]] constexpr int other(int rank, int direction) const noexcept {
    const int count = layout.machines();
    const int inside = layout.local_size;
    const int machine = layout.machine(rank);
    const int local = layout.local(rank);
    if (local == outgoing) {
      const int next = (machine + direction * outer_distance + count) % count;
      return layout.rank(next, local);
    }
    const int to_outgoing = (direction * (outgoing - local) + inside) % inside;
    const int distance = inner_distance + (inner_distance >= to_outgoing ? 1 : 0);
    return layout.rank(machine, (local + direction * distance + inside) % inside);
  }
};

/// In round k, local rank k mod L of each machine sends over a power of two of machines, while
/// the others send over a power of two of local ranks, the outgoing one left out.
///
/// Every rank sends and receives once per round, with weights 1/2; on a single machine the
/// outgoing rank is silent and keeps its value with weight 1. Where L and the number of machine
/// distances share a factor, a given local rank only ever uses some of the machine distances.
class inner_outer_exponential {
 public:
  constexpr inner_outer_exponential() : inner_outer_exponential(3, 3) {}

  /// \param size        the number of ranks, a multiple of `local_size`.
  /// \param local_size  L, the number of ranks of each machine; at least 3.
  /// \throws usage_error otherwise.
  constexpr inner_outer_exponential(int size, int local_size)
      : layout_(expect_equal_machines(size, local_size, 3, "inner_outer_exponential")) {}

  [[nodiscard]] constexpr int size() const noexcept { return layout_.size; }
  [[nodiscard]] constexpr int local_size() const noexcept { return layout_.local_size; }

  /// \return the graph of round `k`. Costs O(1). \throws usage_error if `k` is negative.
  [[nodiscard]] constexpr pairing<inner_outer_exponential_rule> round(std::ptrdiff_t k) const {
    const int machines = layout_.machines();
    return pairing(inner_outer_exponential_rule{layout_, round_in_period(k, local_size()),
                                                machines == 1 ? 0 : power_in_turn(k, machines - 1),
                                                power_in_turn(k, local_size() - 2)});
  }

  /// \return what `rank` does in rounds 0, 1, 2, ...: an endless view.
  [[nodiscard]] constexpr auto rounds(int rank) const { return rounds_of(*this, rank); }

  bool operator==(const inner_outer_exponential&) const = default;

 private:
  /// The k-th of the powers of two up to `largest`, which take turns.
  [[nodiscard]] static constexpr int power_in_turn(std::ptrdiff_t k, int largest) {
    const auto count = static_cast<int>(std::bit_width(static_cast<unsigned>(largest)));
    return 1 << round_in_period(k, count);
  }

  equal_machines layout_;
};

static_assert(schedule<inner_outer_exponential>);

}  // namespace bluefog::topology
