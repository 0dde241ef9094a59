// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bluefog/core/error.hpp>
#include <bluefog/topology/circulant.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// One distance, or none.
class single_offset {
 public:
  constexpr explicit single_offset(int size = 1, int offset = 0)
      : size_(expect_size(size, "shift")), offset_(offset) {
    expects(offset >= 0 && offset < size, "shift: offset must be in [0, ", size, "), got ", offset);
  }

  [[nodiscard]] constexpr int size() const noexcept { return size_; }
  [[nodiscard]] constexpr int degree() const noexcept { return offset_ == 0 ? 0 : 1; }
  [[nodiscard]] constexpr int operator[](int) const noexcept { return offset_; }

  bool operator==(const single_offset&) const = default;

 private:
  int size_;
  int offset_;
};

/// Every rank r sends to the one rank r + offset modulo n; all weights are 1/2.
///
/// What one round of a one-peer schedule is. Offset 0 means that nobody sends.
class shift : public circulant<single_offset> {
 public:
  /// \param size    n, the number of ranks; at least 1.
  /// \param offset  in [0, n).
  /// \throws usage_error otherwise.
  constexpr explicit shift(int size = 1, int offset = 0) : circulant(single_offset(size, offset)) {}

  bool operator==(const shift&) const = default;
};

static_assert(circulant_graph<shift>);

}  // namespace bluefog::topology
