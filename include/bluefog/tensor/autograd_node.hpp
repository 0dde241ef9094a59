// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

namespace bluefog::detail {

/// How autograd owns its nodes: by `std::shared_ptr` in libtorch 2.11, by an intrusive pointer in
/// 2.15.
using autograd_node = decltype(torch::autograd::Edge::function);
inline constexpr bool autograd_counts_inside =
    std::same_as<autograd_node, c10::intrusive_ptr<torch::autograd::Node>>;

template <std::derived_from<torch::autograd::Node> Node>
using autograd_pointer =
    std::conditional_t<autograd_counts_inside, c10::intrusive_ptr<Node>, std::shared_ptr<Node>>;

/// Makes a node of autograd's graph.
template <std::derived_from<torch::autograd::Node> Node, class... Args>
[[nodiscard]] autograd_pointer<Node> make_autograd_node(Args&&... args) {
  if constexpr (autograd_counts_inside)
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  else  // libtorch's own deleter takes long chains of nodes apart without recursion
    return std::shared_ptr<Node>(new Node(std::forward<Args>(args)...),
                                 [](Node* node) { deleteNode(node); });
}

/// \return one more owner of a node that `make_autograd_node` has made.
template <std::derived_from<torch::autograd::Node> Node>
[[nodiscard]] autograd_node owner_of(Node& node) {
  if constexpr (autograd_counts_inside)
    return c10::intrusive_ptr<Node>::reclaim_copy(&node);
  else
    return node.shared_from_this();
}

}  // namespace bluefog::detail
