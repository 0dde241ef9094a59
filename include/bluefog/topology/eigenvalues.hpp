// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include <bluefog/core/error.hpp>

namespace bluefog::topology::detail {

/// A square matrix on its way to its eigenvalues.
class dense_matrix {
 public:
  dense_matrix(std::ptrdiff_t size, std::vector<double> values)
      : size_(size), values_(std::move(values)) {}

  [[nodiscard]] std::ptrdiff_t size() const noexcept { return size_; }
  [[nodiscard]] double& operator()(std::ptrdiff_t row, std::ptrdiff_t column) noexcept {
    return values_[static_cast<std::size_t>(row * size_ + column)];
  }

  /// \return the largest modulus of an entry.
  [[nodiscard]] double largest() const {
    double result = 0;
    for (const double value : values_) result = std::max(result, std::abs(value));
    return result;
  }

  /// A reflection I - scale v v^T of up to three neighboring rows, or columns.
  struct reflection {
    std::array<double, 3> v{};
    double scale = 0;
    std::ptrdiff_t width = 3;
  };

  /// \return the reflection that takes `x` to a multiple of the first unit vector.
  [[nodiscard]] static reflection reflect(std::array<double, 3> x, std::ptrdiff_t width) {
    if (width == 2) x[2] = 0;
    const double length = std::hypot(x[0], x[1], x[2]);
    if (length == 0) return {{}, 0, width};
    x[0] += std::copysign(length, x[0]);
    return {x, 2 / (x[0] * x[0] + x[1] * x[1] + x[2] * x[2]), width};
  }

  /// Applies `h` from the left to rows from `row` on, in columns [first, last].
  void reflect_rows(const reflection& h, std::ptrdiff_t row, std::ptrdiff_t first,
                    std::ptrdiff_t last) {
    for (auto column = first; column <= last; ++column) {
      double sum = 0;
      for (std::ptrdiff_t k = 0; k < h.width; ++k)
        sum += h.v[static_cast<std::size_t>(k)] * (*this)(row + k, column);
      for (std::ptrdiff_t k = 0; k < h.width; ++k)
        (*this)(row + k, column) -= h.scale * sum * h.v[static_cast<std::size_t>(k)];
    }
  }

  /// Applies `h` from the right to columns from `column` on, in rows [first, last].
  void reflect_columns(const reflection& h, std::ptrdiff_t column, std::ptrdiff_t first,
                       std::ptrdiff_t last) {
    for (auto row = first; row <= last; ++row) {
      double sum = 0;
      for (std::ptrdiff_t k = 0; k < h.width; ++k)
        sum += h.v[static_cast<std::size_t>(k)] * (*this)(row, column + k);
      for (std::ptrdiff_t k = 0; k < h.width; ++k)
        (*this)(row, column + k) -= h.scale * sum * h.v[static_cast<std::size_t>(k)];
    }
  }

 private:
  std::ptrdiff_t size_;
  std::vector<double> values_;
};

/// Clears what lies below the first subdiagonal, by Gaussian similarity transformations.
inline void reduce_to_hessenberg(dense_matrix& a) {
  const auto n = a.size();
  for (std::ptrdiff_t m = 1; m + 1 < n; ++m) {
    auto pivot = m;
    for (auto i = m + 1; i < n; ++i)
      if (std::abs(a(i, m - 1)) > std::abs(a(pivot, m - 1))) pivot = i;
    if (a(pivot, m - 1) == 0) continue;
    if (pivot != m) {
      for (auto j = m - 1; j < n; ++j) std::swap(a(pivot, j), a(m, j));
      for (std::ptrdiff_t i = 0; i < n; ++i) std::swap(a(i, pivot), a(i, m));
    }
    for (auto i = m + 1; i < n; ++i) {
      const double factor = a(i, m - 1) / a(m, m - 1);
      if (factor == 0) continue;
      a(i, m - 1) = 0;
      for (auto j = m; j < n; ++j) a(i, j) -= factor * a(m, j);
      for (std::ptrdiff_t k = 0; k < n; ++k) a(k, m) += factor * a(k, i);
    }
  }
}

/// One implicit double-shift step (Francis) on rows and columns [low, high] of a Hessenberg matrix.
/// \param sum, product  of the two shifts.
inline void double_shift_step(dense_matrix& a, std::ptrdiff_t low, std::ptrdiff_t high, double sum,
                              double product) {
  std::array<double, 3> x{
      a(low, low) * (a(low, low) - sum) + product + a(low, low + 1) * a(low + 1, low),
      a(low + 1, low) * (a(low, low) + a(low + 1, low + 1) - sum),
      a(low + 1, low) * a(low + 2, low + 1)};
  for (auto k = low; k < high; ++k) {
    const std::ptrdiff_t width = k + 2 <= high ? 3 : 2;
    const auto h = dense_matrix::reflect(x, width);
    a.reflect_rows(h, k, std::max(low, k - 1), high);
    a.reflect_columns(h, k, low, std::min(k + 3, high));
    if (k > low)
      for (auto i = k + 1; i < k + width; ++i) a(i, k - 1) = 0;
    if (k + 1 < high) x = {a(k + 1, k), a(k + 2, k), k + 3 <= high ? a(k + 3, k) : 0.0};
  }
}

/// \return the eigenvalues of the square matrix `values`, row after row, in no order.
/// \note About 10 n^3 operations, by the QR algorithm.
/// \see Golub and Van Loan, "Matrix Computations", chapter 7.5.
[[nodiscard]] inline std::vector<std::complex<double>> eigenvalues(std::ptrdiff_t size,
                                                                   std::vector<double> values) {
  dense_matrix a(size, std::move(values));
  // A little above rounding: clusters of equal eigenvalues leave noise of that size for ever.
  const double negligible = 16 * std::numeric_limits<double>::epsilon() * a.largest();
  reduce_to_hessenberg(a);

  std::vector<std::complex<double>> found;
  int steps = 0;
  for (auto high = size - 1; high >= 0;) {
    auto low = high;  // where the block that ends at `high` begins
    for (; low > 0; --low) {
      if (std::abs(a(low, low - 1)) <= negligible) break;
    }
    if (low > 0) a(low, low - 1) = 0;

    if (low == high) {
      found.emplace_back(a(high, high));
      --high;
      steps = 0;
      continue;
    }
    const double sum = a(high, high) + a(high - 1, high - 1);
    const double product =
        a(high, high) * a(high - 1, high - 1) - a(high, high - 1) * a(high - 1, high);
    if (low + 1 == high) {
      const double middle = (a(high - 1, high - 1) - a(high, high)) / 2;
      const auto root =
          std::sqrt(std::complex(middle * middle + a(high, high - 1) * a(high - 1, high), 0.0));
      found.push_back(sum / 2 + root);
      found.push_back(sum / 2 - root);
      high -= 2;
      steps = 0;
      continue;
    }
    expects<error>(++steps <= 100, "spectral_gap: the QR algorithm must converge, got stuck at ",
                   high, " of ", size);
    if (steps % 10 == 0) {  // an unusual shift gets it out of a cycle
      const double center = a(high, high);
      const double spread = std::abs(a(high, high - 1)) + std::abs(a(high - 1, high - 2));
      double_shift_step(a, low, high, 2 * center + 1.5 * spread,
                        center * center + 1.5 * center * spread + spread * spread);
    } else {
      double_shift_step(a, low, high, sum, product);
    }
  }
  return found;
}

}  // namespace bluefog::topology::detail
