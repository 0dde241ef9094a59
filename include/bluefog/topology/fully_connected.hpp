// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bluefog/topology/circulant.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// Every distance from 1 to n - 1.
class all_offsets {
 public:
  constexpr explicit all_offsets(int size = 1) : size_(expect_size(size, "fully_connected")) {}

  [[nodiscard]] constexpr int size() const noexcept { return size_; }
  [[nodiscard]] constexpr int degree() const noexcept { return size_ - 1; }
  [[nodiscard]] constexpr int operator[](int k) const noexcept { return k + 1; }

  bool operator==(const all_offsets&) const = default;

 private:
  int size_;
};

/// Every rank sends to every other; all weights are 1 / n.
///
/// One round gives the exact average, at the price of n - 1 messages per rank.
class fully_connected : public circulant<all_offsets> {
 public:
  /// \param size  n, the number of ranks; at least 1.
  /// \throws usage_error if `size` is below 1.
  constexpr explicit fully_connected(int size = 1) : circulant(all_offsets(size)) {}

  bool operator==(const fully_connected&) const = default;
};

static_assert(circulant_graph<fully_connected>);

}  // namespace bluefog::topology
