// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/edge_view.hpp>
#include <bluefog/topology/indexed_view.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// A grid of rows by columns without wrap-around, numbered row by row; a rank is joined with the
/// ranks above, below, left and right of it.
///
/// Metropolis-Hastings weights: with \f$ D_i \f$ the number of neighbors of i and i itself, an edge
/// weighs \f$ 1 / \max(D_i, D_j) \f$ and a rank keeps what is missing to 1. Symmetric, doubly
/// stochastic, degree at most 4.
class mesh_grid_2d {
 public:
  /// The squarest grid of `size` ranks: the rows are its largest divisor up to its square root.
  /// \throws usage_error if `size` is below 1.
  constexpr explicit mesh_grid_2d(int size = 1) : mesh_grid_2d(squarest(size), size) {}

  /// \throws usage_error if `rows` or `columns` is below 1.
  constexpr mesh_grid_2d(int rows, int columns) : rows_(rows), columns_(columns) {
    expects(rows >= 1 && columns >= 1, "mesh_grid_2d: rows and columns must be at least 1, got ",
            rows, " by ", columns);
    expects(rows <= 2147483647 / columns, "mesh_grid_2d: too many ranks, got ", rows, " by ",
            columns);
  }

  [[nodiscard]] constexpr int size() const noexcept { return rows_ * columns_; }
  [[nodiscard]] constexpr int rows() const noexcept { return rows_; }
  [[nodiscard]] constexpr int columns() const noexcept { return columns_; }

  /// \return the ranks that `rank` sends to, ascending.
  [[nodiscard]] constexpr auto out_neighbors(int rank) const {
    expect_rank(rank, size(), "out_neighbors");
    const int row = rank / columns_;
    const int column = rank % columns_;
    four_ranks ranks;
    int count = 0;
    const auto add = [&](bool exists, int neighbor) {
      if (exists) ranks.values[static_cast<std::size_t>(count++)] = neighbor;
    };
    add(row > 0, rank - columns_);
    add(column > 0, rank - 1);
    add(column + 1 < columns_, rank + 1);
    add(row + 1 < rows_, rank + columns_);
    return indexed_view(ranks, count);
  }

  /// \return the ranks that send to `rank`, ascending: the same ones.
  [[nodiscard]] constexpr auto in_neighbors(int rank) const { return out_neighbors(rank); }

  /// \return the weight of an edge, or of a self-loop; 0 where there is none.
  [[nodiscard]] constexpr double weight(int source, int destination) const {
    expect_rank(source, size(), "weight");
    expect_rank(destination, size(), "weight");
    if (source == destination) {
      double given = 0;
      for (const int neighbor : out_neighbors(source)) given += edge_weight(source, neighbor);
      return 1.0 - given;
    }
    return std::ranges::count(out_neighbors(source), destination) != 0
               ? edge_weight(source, destination)
               : 0.0;
  }

  [[nodiscard]] constexpr edge_view<mesh_grid_2d> edges() const { return edge_view(*this); }

  bool operator==(const mesh_grid_2d&) const = default;

 private:
  struct four_ranks {
    std::array<int, 4> values{};

    constexpr int operator()(std::ptrdiff_t k) const noexcept {
      return values[static_cast<std::size_t>(k)];
    }
  };

  /// Marks the delegated constructor that divides the ranks among the rows.
  struct squarest {
    constexpr explicit squarest(int size) {
      expect_size(size, "mesh_grid_2d");
      for (int divisor = 1; divisor <= size / divisor; ++divisor)
        if (size % divisor == 0) rows = divisor;
    }
    int rows = 1;
  };

  constexpr mesh_grid_2d(squarest shape, int size) : mesh_grid_2d(shape.rows, size / shape.rows) {}

  [[nodiscard]] constexpr double edge_weight(int a, int b) const {
    return 1.0 /
           static_cast<double>(1 + std::max(out_neighbors(a).size(), out_neighbors(b).size()));
  }

  int rows_;
  int columns_;
};

static_assert(graph<mesh_grid_2d>);

}  // namespace bluefog::topology
