// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>

#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/rank_check.hpp>
#include <bluefog/topology/rounds.hpp>
#include <bluefog/topology/shift.hpp>

namespace bluefog::topology {

/// Exponential graphs taken apart: in round k every rank sends to the one rank
/// \f$ r + 2^{k \bmod \tau} \f$ modulo n, with \f$ \tau = \lceil \log_2 n \rceil \f$.
///
/// One message per rank and round, all weights 1/2. If n is a power of two, any \f$ \tau \f$ rounds
/// in a row give the exact average. With one rank, rounds are empty.
///
/// \see Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training",
///      NeurIPS 2021.
class one_peer_exponential {
 public:
  /// \param size  n, the number of ranks; at least 1.
  /// \throws usage_error if `size` is below 1.
  constexpr explicit one_peer_exponential(int size = 1)
      : size_(expect_size(size, "one_peer_exponential")) {}

  [[nodiscard]] constexpr int size() const noexcept { return size_; }

  /// \return tau, after how many rounds the sequence repeats; 1 with a single rank.
  [[nodiscard]] constexpr int period() const noexcept {
    return size_ == 1 ? 1 : static_cast<int>(std::bit_width(static_cast<unsigned>(size_ - 1)));
  }

  /// \return the graph of round `k`. Costs O(1). \throws usage_error if `k` is negative.
  [[nodiscard]] constexpr shift round(std::ptrdiff_t k) const {
    const int exponent = round_in_period(k, period());
    return shift(size_, size_ == 1 ? 0 : 1 << exponent);
  }

  /// \return what `rank` does in rounds 0, 1, 2, ...: an endless view.
  [[nodiscard]] constexpr auto rounds(int rank) const { return rounds_of(*this, rank); }

  bool operator==(const one_peer_exponential&) const = default;

 private:
  int size_;
};

static_assert(schedule<one_peer_exponential>);

}  // namespace bluefog::topology
