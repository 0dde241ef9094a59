// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/optim/mixer.hpp>
#include <bluefog/optim/partial_step.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/device.hpp>

namespace bluefog::optim::detail {

/// An optimizer as what steps inside a backward sees it. It may move, so it is looked up each time.
struct stepping_optimizer {
  std::function<void()> step;                     ///< the user's optimizer's
  std::function<partial_step::groups&()> groups;  ///< its groups
};

/// One step of an optimizer, taken in a backward: for each part of the parameters, when its
/// gradients are complete, combines it with what was sent for it, adapts it, and sends it anew.
///
/// Parts are taken in the order of sending, whatever order gradients become ready in, so what is
/// sent is in the same order on all ranks. If anything fails, earlier parts have stepped, later
/// ones do not, and what was sent anew is dropped.
template <backend Backend, averaging_topology Topology>
class backward_step {
 public:
  /// \param ranges  the parts that travel, in the order in which they were sent.
  /// \param again   whether to send each part anew.
  backward_step(const stepping_optimizer& optimizer, const parameter_arena& arena,
                std::vector<parameter_arena::range> ranges, mixer<Backend, Topology>& mixing,
                bool again)
      : optimizer_(optimizer),
        arena_(arena),
        ranges_(std::move(ranges)),
        mixer_(mixing),
        again_(again),
        flights_(mixing.take()),
        members_(ranges_.size() + 1),
        parts_(optimizer_.groups(), arena, ranges_) {
    for (std::size_t i = 0; i < arena.size(); ++i) {
      part_of_.push_back(partial_step::part_of(arena.tensor(i), arena, ranges_));
      members_[part_of_.back()].push_back(i);
    }
    for (const auto& each : members_) missing_.push_back(each.size());
  }

  /// The gradient of parameter `index` is complete.
  void ready(std::size_t index) {
    order_.pass(arena_.tensor(index).device());
    --missing_[part_of_[index]];
    or_drop([&] {
      while (next_ < ranges_.size() && missing_[next_] == 0) take(next_++);
    });
  }

  /// What is left: parameters that the backward did not reach, and those that do not travel.
  void finish() {
    if (arena_.size() > 0) order_.pass(arena_.tensor(0).device());
    or_drop([&] {
      while (next_ < ranges_.size()) take(next_++);
      for (std::size_t i = ranges_.size(); i < flights_.size(); ++i) mixer_.finish(flights_[i]);
      adapt(ranges_.size());
    });
  }

 private:
  using flight = typename mixer<Backend, Topology>::flight;

  template <std::invocable Act>
  void or_drop(Act act) {
    try {
      act();
    } catch (...) {
      mixer_.drop();
      throw;
    }
  }

  void take(std::size_t part) {
    const c10::AutoGradMode no_grad(false);
    if (!flights_.empty()) {
      mixer_.finish(flights_[part]);
      for (const std::size_t i : members_[part])
        arena_.tensor(i).unsafeGetTensorImpl()->bump_version();
    }
    adapt(part);
    if (!again_) return;
    if (part == 0) mixer_.begin();
    mixer_.send(arena_, ranges_[part]);
  }

  void adapt(std::size_t part) {
    const auto only = parts_.select(optimizer_.groups(), part);
    optimizer_.step();
  }

  const stepping_optimizer& optimizer_;
  const parameter_arena& arena_;
  std::vector<parameter_arena::range> ranges_;
  mixer<Backend, Topology>& mixer_;
  bool again_;
  std::vector<flight> flights_;
  std::size_t next_ = 0;
  std::vector<std::vector<std::size_t>> members_;  // of each part, then of none
  std::vector<std::size_t> missing_;
  std::vector<std::size_t> part_of_;
  partial_step parts_;
  bluefog::detail::relay order_;  // gradients may become ready on several streams
};

}  // namespace bluefog::optim::detail
