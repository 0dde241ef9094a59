// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bluefog/topology/circulant.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/powers.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// The distances whose shorter way around is a power of a base.
class symmetric_power_offsets {
 public:
  constexpr explicit symmetric_power_offsets(int size = 1, int base = 4)
      : size_(expect_size(size, "symmetric_exponential")),
        base_(base),
        forward_(powers_below(base, size / 2 + 1, "symmetric_exponential")),
        backward_(powers_below(base, size - size / 2, "symmetric_exponential")) {}

  [[nodiscard]] constexpr int size() const noexcept { return size_; }
  [[nodiscard]] constexpr int degree() const noexcept { return forward_ + backward_; }
  [[nodiscard]] constexpr int operator[](int k) const {
    return k < forward_ ? power(base_, k) : size_ - power(base_, degree() - 1 - k);
  }

  bool operator==(const symmetric_power_offsets&) const = default;

 private:
  int size_;
  int base_;
  int forward_;   // distances up to n / 2
  int backward_;  // distances beyond, which are shorter the other way around
};

/// The symmetric exponential graph: rank r is joined with r ± 1, r ± b, r ± b^2, ... modulo n, as
/// far as n / 2.
///
/// The undirected sister of `exponential`, for methods that need a symmetric matrix. Every edge
/// and self-loop weighs 1 / (degree + 1): doubly stochastic.
class symmetric_exponential : public circulant<symmetric_power_offsets> {
 public:
  /// \param size  n, the number of ranks; at least 1.
  /// \param base  b, at least 2.
  /// \throws usage_error if either is too small.
  constexpr explicit symmetric_exponential(int size = 1, int base = 4)
      : circulant(symmetric_power_offsets(size, base)) {}

  bool operator==(const symmetric_exponential&) const = default;
};

static_assert(circulant_graph<symmetric_exponential>);

}  // namespace bluefog::topology
