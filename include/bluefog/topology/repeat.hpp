// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/rounds.hpp>

namespace bluefog::topology {

/// The schedule whose every round is the same graph, with that graph's weights.
template <graph Graph>
class repeat {
 public:
  constexpr repeat() = default;
  constexpr explicit repeat(Graph graph) : graph_(std::move(graph)) {}

  [[nodiscard]] constexpr int size() const { return graph_.size(); }

  /// \return the graph. \throws usage_error if `k` is negative.
  [[nodiscard]] constexpr Graph round(std::ptrdiff_t k) const {
    expects(k >= 0, "round: number must not be negative, got ", k);
    return graph_;
  }

  /// \return what `rank` does in rounds 0, 1, 2, ...: an endless view.
  [[nodiscard]] constexpr auto rounds(int rank) const { return rounds_of(*this, rank); }

  bool operator==(const repeat&) const = default;

 private:
  Graph graph_{};
};

}  // namespace bluefog::topology
