// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bluefog/topology/circulant.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/powers.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// The powers of a base that are below n.
class power_offsets {
 public:
  constexpr explicit power_offsets(int size = 1, int base = 2)
      : size_(expect_size(size, "exponential")),
        base_(base),
        degree_(powers_below(base, size, "exponential")) {}

  [[nodiscard]] constexpr int size() const noexcept { return size_; }
  [[nodiscard]] constexpr int degree() const noexcept { return degree_; }
  [[nodiscard]] constexpr int operator[](int k) const { return power(base_, k); }

  bool operator==(const power_offsets&) const = default;

 private:
  int size_;
  int base_;
  int degree_;
};

/// The static exponential graph: rank r sends to r + 1, r + b, r + b^2, ... modulo n.
///
/// Base 2 is the usual choice and the default topology: \f$ d = \lceil \log_2 n \rceil \f$
/// neighbors, and \f$ \rho = 1 - 2 / (1 + d) \f$ for even n, so information spreads in O(log n)
/// rounds. Every edge and self-loop weighs 1 / (d + 1): doubly stochastic.
///
/// \see Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training",
///      NeurIPS 2021.
class exponential : public circulant<power_offsets> {
 public:
  /// \param size  n, the number of ranks; at least 1.
  /// \param base  b, at least 2.
  /// \throws usage_error if either is too small.
  constexpr explicit exponential(int size = 1, int base = 2)
      : circulant(power_offsets(size, base)) {}

  bool operator==(const exponential&) const = default;
};

static_assert(circulant_graph<exponential>);

}  // namespace bluefog::topology
