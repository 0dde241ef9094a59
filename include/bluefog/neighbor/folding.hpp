// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/dtype.hpp>
#include <bluefog/core/kernels.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog::detail {

/// Whether what several sources send can be added up as it comes, bit for bit as in one pass: the
/// sum is kept in the type that it is computed in, and messages may be received one by one.
template <backend Backend>
[[nodiscard]] bool folds(const neighborhood& links, dtype type) noexcept {
  return !device_backend<Backend> && links.sources.size() > 1 &&
         (type == dtype::float32 || type == dtype::float64);
}

/// Memory that several operations receive in, one at a time. Any thread may enter and leave.
class landing {
 public:
  /// \return whether the caller has it for itself now, until it leaves.
  [[nodiscard]] bool enter() noexcept { return !taken_.exchange(true); }
  void leave() noexcept { taken_ = false; }

  /// \return at least `bytes` bytes, for who has entered; kept until somebody needs more.
  [[nodiscard]] std::byte* memory(std::size_t bytes) {
    constexpr std::size_t unit = scratch_pool::alignment;
    if (bytes <= size_) return memory_.get();
    const scratch_pool::source heap;
    memory_.reset();  // before there is more
    size_ = 0;
    memory_ = {heap.allocate((bytes + unit - 1) / unit * unit), heap.release};
    size_ = bytes;
    return memory_.get();
  }

 private:
  std::atomic<bool> taken_ = false;
  std::unique_ptr<std::byte, void (*)(std::byte*) noexcept> memory_{nullptr, nullptr};
  std::size_t size_ = 0;
};

/// The turn of one operation at a landing.
class turn {
 public:
  turn() noexcept = default;
  explicit turn(std::shared_ptr<landing> place) noexcept : place_(std::move(place)) {}
  turn(turn&& other) noexcept
      : place_(std::move(other.place_)), mine_(std::exchange(other.mine_, false)) {}
  turn& operator=(turn&& other) noexcept {
    std::swap(place_, other.place_);
    std::swap(mine_, other.mine_);
    return *this;
  }
  turn(const turn&) = delete;
  turn& operator=(const turn&) = delete;
  ~turn() { end(); }

  /// \return whether it has come; then until `end()`.
  [[nodiscard]] bool come() noexcept {
    if (!mine_) mine_ = place_->enter();
    return mine_;
  }
  void end() noexcept {
    if (std::exchange(mine_, false)) place_->leave();
  }
  [[nodiscard]] std::byte* memory(std::size_t bytes) { return place_->memory(bytes); }

 private:
  std::shared_ptr<landing> place_;
  bool mine_ = false;
};

/// Sends that are under way, and beside them one receive after the other, each added to the sum as
/// it comes. A pending operation; borrows what it sends and `own`.
///
/// The sends wait for nothing, so ranks may receive in any order. If anything fails, nothing more
/// is received, and the failure is thrown once nothing is in flight.
template <backend Backend>
class folding {
 public:
  using native_operation = typename Backend::operation_type;

  folding() = default;  // complete
  /// \param own    this rank's values, float32 or float64.
  /// \param sum    gets a block for the sum when the turn has come.
  /// \param sends  of the same operation.
  folding(operation_context<Backend> context, const_buffer own, neighborhood links,
          std::shared_ptr<arrivals> sum, turn its_turn, native_operation sends)
      : context_(context),
        own_(own),
        links_(std::move(links)),
        sum_(std::move(sum)),
        turn_(std::move(its_turn)),
        sends_(std::move(sends)) {}

  [[nodiscard]] bool ready() {
    if (!stopped_) try {
        const bool sent = sends_.ready();
        return receive_all() && sent;
      } catch (...) {
        failure_ = std::current_exception();
        stop();
      }
    const bool sent = settled(sends_);
    if (!settled(receiving_) || !sent) return false;
    turn_.end();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    return true;
  }

  void abandon() noexcept {
    sends_.abandon();
    if (!stopped_) stop();
    receiving_.abandon();
  }

  [[nodiscard]] std::vector<int> waiting_for() const {
    auto ranks = sends_.waiting_for();
    for (const int rank : receiving_.waiting_for()) ranks.push_back(rank);
    std::ranges::sort(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

 private:
  [[nodiscard]] bool receive_all() {
    for (; folded_ < links_.sources.size(); fold()) {
      if (!receives_ && !turn_.come()) return false;
      if (!receives_) receive({memory(), own_.count, own_.type});
      if (!received()) return false;
    }
    turn_.end();
    return true;
  }

  // Where the next source is received: the first one where the sum will be.
  [[nodiscard]] std::byte* memory() {
    if (folded_ == 0) return sum_->emplace_back(context_->scratch(own_.bytes(), own_.data)).data();
    return turn_.memory(own_.bytes());
  }

  void receive(mutable_buffer out) {
    auto exchange = context_->exchange();
    exchange.receive(out, links_.sources[folded_].rank);
    receiving_ = std::move(exchange).submit();
    receives_ = true;
  }
  [[nodiscard]] bool received() {
    try {
      return receiving_.ready();
    } catch (...) {  // the transport knows that the rest is not wanted
      refused_ = true;
      throw;
    }
  }

  // The kernel multiplies what is there by one, which changes nothing, and rounds as in one pass.
  void fold() {
    const mutable_buffer sum{sum_->front().data(), own_.count, own_.type};
    const bool first = folded_ == 0;
    const kernel::weighted_input term{links_.sources[folded_].weight,
                                      first ? sum.data : turn_.memory(own_.bytes())};
    context_->compute().mix(sum, first ? links_.self_weight : 1.0, first ? own_ : const_buffer(sum),
                            std::span(&term, 1));
    receives_ = false;
    ++folded_;
  }

  // Receives no more, and tells the transport that what is still to come is nobody's.
  void stop() noexcept {
    stopped_ = true;
    if (refused_ || folded_ == links_.sources.size()) return;
    try {
      if (!receives_) receive({nullptr, 0, own_.type});  // given up before anything is received
      receiving_.abandon();
    } catch (...) {  // then it is found later, as a stray
    }
  }

  [[nodiscard]] static bool settled(native_operation& it) noexcept {
    try {
      return it.ready();
    } catch (...) {
      return true;
    }
  }

  std::optional<operation_context<Backend>> context_;
  const_buffer own_{};
  neighborhood links_;
  std::shared_ptr<arrivals> sum_;
  turn turn_;  // with the memory that receives all sources but the first
  native_operation sends_;
  native_operation receiving_;
  std::size_t folded_ = 0;  // sources
  bool receives_ = false;   // from the next source
  bool refused_ = false;    // by the transport: a receive has failed
  bool stopped_ = false;
  std::exception_ptr failure_;
};

/// Averages with several neighbours as `mix_task` does, bit for bit. However many they are, it
/// holds the memory of one array, the sum's, and in its turn that of the landing.
///
/// \param own  of the type that `folds`; only read.
/// \param sum  gets one block, the average. Nothing else is written.
template <backend Backend>
  requires(!device_backend<Backend>)
task fold_task(operation_context<Backend> context, const_buffer own, neighborhood links,
               std::shared_ptr<arrivals> sum, turn its_turn) {
  const packed_layout layout(own);
  auto exchange = context.exchange();
  const auto weighted = add_sends(exchange, context, own.data, layout, links.destinations);
  folding<Backend> average(context, own, links, std::move(sum), std::move(its_turn),
                           std::move(exchange).submit());
  co_await average;
}

}  // namespace bluefog::detail
