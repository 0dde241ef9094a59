// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/edge_view.hpp>
#include <bluefog/topology/indexed_view.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// One rank in the middle is joined with every other.
///
/// Every spoke, and the center itself, weighs 1 / n; a leaf keeps 1 - 1 / n: symmetric, doubly
/// stochastic, \f$ \rho = 1 - 1 / n \f$ for n > 2. The center has degree n - 1, a leaf 1.
class star {
 public:
  /// \param size    n, the number of ranks; at least 1.
  /// \param center  the rank in the middle.
  /// \throws usage_error if `size` is below 1 or there is no rank `center`.
  constexpr explicit star(int size = 1, int center = 0)
      : size_(expect_size(size, "star")), center_(center) {
    expect_rank(center, size, "star, center");
  }

  [[nodiscard]] constexpr int size() const noexcept { return size_; }
  [[nodiscard]] constexpr int center() const noexcept { return center_; }

  /// \return the ranks that `rank` sends to, ascending.
  [[nodiscard]] constexpr auto out_neighbors(int rank) const {
    expect_rank(rank, size_, "out_neighbors");
    const bool middle = rank == center_;
    return indexed_view(spoke{center_, middle}, middle ? size_ - 1 : 1);
  }

  /// \return the ranks that send to `rank`, ascending: the same ones.
  [[nodiscard]] constexpr auto in_neighbors(int rank) const { return out_neighbors(rank); }

  /// \return the weight of an edge, or of a self-loop; 0 where there is none.
  [[nodiscard]] constexpr double weight(int source, int destination) const {
    expect_rank(source, size_, "weight");
    expect_rank(destination, size_, "weight");
    const double spoke_weight = 1.0 / size_;
    if (source == center_ || destination == center_) return spoke_weight;
    return source == destination ? 1.0 - spoke_weight : 0.0;
  }

  [[nodiscard]] constexpr edge_view<star> edges() const { return edge_view(*this); }

  bool operator==(const star&) const = default;

 private:
  /// The k-th neighbor: of the center all others, of a leaf the center.
  struct spoke {
    int center = 0;
    bool from_center = false;

    constexpr int operator()(std::ptrdiff_t k) const noexcept {
      const int index = static_cast<int>(k);
      if (!from_center) return center;
      return index < center ? index : index + 1;
    }
  };

  int size_;
  int center_;
};

static_assert(graph<star>);

}  // namespace bluefog::topology
