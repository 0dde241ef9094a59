// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstddef>
#include <iterator>
#include <ranges>
#include <utility>

namespace bluefog::topology {

/// A weighted edge of a graph, or a self-loop where both ends are equal.
struct directed_edge {
  int source = 0;
  int destination = 0;
  double weight = 1.0;

  bool operator==(const directed_edge&) const = default;
};

/// The edges of a graph without its self-loops, by ascending source, then destination.
///
/// A forward range that makes its elements as it goes and holds the graph by value.
template <class Graph>
class edge_view : public std::ranges::view_interface<edge_view<Graph>> {
 public:
  class iterator {
   public:
    using iterator_concept = std::forward_iterator_tag;
    using iterator_category = std::input_iterator_tag;
    using value_type = directed_edge;
    using difference_type = std::ptrdiff_t;

    constexpr iterator() = default;
    constexpr explicit iterator(const Graph& graph) : graph_(&graph), size_(graph.size()) {
      settle();
    }

    [[nodiscard]] constexpr directed_edge operator*() const {
      const int destination = graph_->out_neighbors(source_)[index_];
      return {source_, destination, graph_->weight(source_, destination)};
    }
    constexpr iterator& operator++() {
      ++index_;
      settle();
      return *this;
    }
    constexpr iterator operator++(int) {
      auto before = *this;
      ++*this;
      return before;
    }
    [[nodiscard]] constexpr bool operator==(const iterator&) const = default;
    [[nodiscard]] constexpr bool operator==(std::default_sentinel_t) const {
      return source_ == size_;
    }

   private:
    /// Moves on to the next rank that has an edge left.
    constexpr void settle() {
      while (source_ < size_ && index_ >= std::ssize(graph_->out_neighbors(source_))) {
        ++source_;
        index_ = 0;
      }
    }

    const Graph* graph_ = nullptr;
    int size_ = 0;
    int source_ = 0;
    std::ptrdiff_t index_ = 0;
  };

  constexpr edge_view() = default;
  constexpr explicit edge_view(Graph graph) : graph_(std::move(graph)) {}

  [[nodiscard]] constexpr iterator begin() const { return iterator(graph_); }
  [[nodiscard]] constexpr std::default_sentinel_t end() const noexcept { return {}; }

 private:
  Graph graph_;
};

}  // namespace bluefog::topology
