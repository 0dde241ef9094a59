// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bluefog/topology/circulant.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// Which way a ring sends: both ways, to the rank below (left), or to the rank above (right).
enum class ring_style { bidirectional, left, right };

/// The distances of a ring: 1, n - 1, or both.
class ring_offsets {
 public:
  constexpr explicit ring_offsets(int size = 1, ring_style style = ring_style::bidirectional)
      : size_(expect_size(size, "ring")), style_(style) {
    expects(style == ring_style::bidirectional || style == ring_style::left ||
                style == ring_style::right,
            "ring: style must be bidirectional, left or right, got number ",
            static_cast<int>(style));
  }

  [[nodiscard]] constexpr int size() const noexcept { return size_; }
  [[nodiscard]] constexpr int degree() const noexcept {
    const int wanted = style_ == ring_style::bidirectional ? 2 : 1;
    return wanted < size_ ? wanted : size_ - 1;
  }
  [[nodiscard]] constexpr int operator[](int k) const noexcept {
    return k == 1 || style_ == ring_style::left ? size_ - 1 : 1;
  }

  bool operator==(const ring_offsets&) const = default;

 private:
  int size_;
  ring_style style_;
};

/// The ring: rank r sends to r + 1, to r - 1, or to both, modulo n.
///
/// The least traffic and the slowest mixing: \f$ \rho = (1 + 2 \cos(2 \pi / n)) / 3 \f$ both ways
/// (n >= 4), \f$ \cos(\pi / n) \f$ one way. Every edge and self-loop weighs 1 / (degree + 1):
/// doubly stochastic.
class ring : public circulant<ring_offsets> {
 public:
  /// \param size   n, the number of ranks; at least 1.
  /// \param style  which way to send.
  /// \throws usage_error if `size` is below 1 or `style` none of the three.
  constexpr explicit ring(int size = 1, ring_style style = ring_style::bidirectional)
      : circulant(ring_offsets(size, style)) {}

  bool operator==(const ring&) const = default;
};

static_assert(circulant_graph<ring>);

}  // namespace bluefog::topology
