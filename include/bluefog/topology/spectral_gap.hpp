// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numbers>
#include <vector>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/circulant.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/eigenvalues.hpp>
#include <bluefog/topology/properties.hpp>

namespace bluefog::topology {

namespace detail {

/// The eigenvalues of a circulant graph, which are the discrete Fourier transform of one row:
/// without that of the constant vector, and of each conjugate pair only one.
template <circulant_graph Graph>
[[nodiscard]] std::vector<std::complex<double>> circulant_eigenvalues(const Graph& graph) {
  const auto offsets = graph.offsets();
  const int n = graph.size();
  const double self = graph.weight(0, 0);
  std::vector<double> weights;
  for (int k = 0; k < offsets.degree(); ++k) weights.push_back(graph.weight(0, offsets[k]));
  const auto count = static_cast<std::size_t>(n / 2);
  if (offsets.degree() == n - 1 && std::ranges::count(weights, self) == n - 1)
    return std::vector<std::complex<double>>(count);

  std::vector<std::complex<double>> roots;
  for (int m = 0; m < n; ++m) roots.push_back(std::polar(1.0, 2 * std::numbers::pi * m / n));
  std::vector<std::complex<double>> values(count, self);
  for (std::int64_t m = 1; m <= n / 2; ++m)  // the others are conjugates of these
    for (int k = 0; k < offsets.degree(); ++k)
      values[static_cast<std::size_t>(m - 1)] +=
          weights[static_cast<std::size_t>(k)] *
          roots[static_cast<std::size_t>(m * offsets[k] % n)];
  return values;
}

}  // namespace detail

/// \return \f$ 1 - \max_{i \ge 2} |\lambda_i(W)| \f$: how fast repeated averaging forgets where it
///         started. 1 is at once; 0 is never, as with ranks that do not reach each other.
///
/// To 1e-9 for the graphs of this folder and whatever has a well-conditioned spectrum.
///
/// \throws usage_error for a graph of more than 512 ranks that is not circulant.
/// \note Costs O(n * degree) for circulant graphs and about 10 n^3 operations for others.
template <graph Graph>
[[nodiscard]] double spectral_gap(const Graph& graph) {
  const int n = graph.size();
  if (n == 1) return 1.0;
  if constexpr (circulant_graph<Graph>) {
    double largest = 0;
    for (const auto& value : detail::circulant_eigenvalues(graph))
      largest = std::max(largest, std::abs(value));
    return 1.0 - largest;
  } else {
    expects(n <= 512,
            "spectral_gap: a graph that is not circulant must have at most 512 ranks, got ", n);
    std::vector<double> moduli;
    for (const auto& value : detail::eigenvalues(n, weight_matrix(graph)))
      moduli.push_back(std::abs(value));
    std::ranges::nth_element(moduli, moduli.begin() + 1, std::greater{});
    return 1.0 - moduli[1];
  }
}

}  // namespace bluefog::topology
