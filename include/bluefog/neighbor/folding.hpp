// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
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
[[nodiscard]] constexpr bool foldable(dtype type) noexcept {
  return !device_backend<Backend> && (type == dtype::float32 || type == dtype::float64);
}
/// Whether that is done for a rank with these sources.
template <backend Backend>
[[nodiscard]] bool folds(const neighborhood& links, dtype type) noexcept {
  return foldable<Backend>(type) && links.sources.size() > 1;
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

/// Sends that are under way, and beside them receives, each added to the sum as it comes. A pending
/// operation; borrows what it sends and `own`.
///
/// Two receives are under way at most: that of the first source, where the sum will be, and in its
/// turn that of another one at the landing. The sends wait for neither, so ranks may receive in any
/// order. If anything fails, no further receive begins, and the failure is thrown once nothing is
/// in flight.
template <backend Backend>
class folding {
 public:
  using native_operation = typename Backend::operation_type;

  folding() = default;  // complete
  /// \param own    this rank's values, float32 or float64.
  /// \param links  with at least one source.
  /// \param sum    gets a block for the sum.
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
    bool over = settled(sends_);
    over = settled(first_) && over;  // each makes progress
    over = settled(later_) && over;
    if (!over) return false;
    turn_.end();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    return true;
  }

  void abandon() noexcept {
    sends_.abandon();
    if (!stopped_) stop();
    first_.abandon();
    later_.abandon();
  }

  [[nodiscard]] std::vector<int> waiting_for() const {
    auto ranks = sends_.waiting_for();
    for (const auto* receive : {&first_, &later_})
      for (const int rank : receive->waiting_for()) ranks.push_back(rank);
    // What waits for its turn waits for this source, and perhaps for later ones that are here.
    if (!stopped_ && later_stage_ == stage::none && next_source() < links_.sources.size())
      ranks.push_back(links_.sources[next_source()].rank);
    std::ranges::sort(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

 private:
  // How far a source is that has memory to be received in.
  enum class stage : std::uint8_t { none, under_way, here };

  [[nodiscard]] bool receive_all() {
    const std::size_t sources = links_.sources.size();
    while (folded_ < sources) {
      if (first_stage_ == stage::none) {
        const auto& memory = sum_->emplace_back(context_->scratch(own_.bytes(), own_.data));
        first_ = receive(memory.data(), own_.count, 0);
        first_stage_ = stage::under_way;
      }
      if (later_stage_ == stage::none && next_source() < sources && turn_.come()) {
        later_ = receive(turn_.memory(own_.bytes()), own_.count, next_source());
        later_stage_ = stage::under_way;
      }
      look(first_, first_stage_);
      look(later_, later_stage_);
      if (folded_ == 0 && first_stage_ == stage::here) {
        fold(links_.self_weight, own_, sum_->front().data());
      } else if (folded_ > 0 && later_stage_ == stage::here) {
        fold(1.0, sum(), turn_.memory(own_.bytes()));
        later_stage_ = stage::none;
      } else {
        return false;
      }
    }
    turn_.end();
    return true;
  }

  // The source that is next at the landing.
  [[nodiscard]] std::size_t next_source() const noexcept {
    return std::max<std::size_t>(1, folded_);
  }
  [[nodiscard]] mutable_buffer sum() const { return {sum_->front().data(), own_.count, own_.type}; }

  [[nodiscard]] native_operation receive(std::byte* memory, std::int64_t count,
                                         std::size_t source) const {
    auto exchange = context_->exchange();
    exchange.receive({memory, count, own_.type}, links_.sources[source].rank);
    return std::move(exchange).submit();
  }
  void look(native_operation& receive, stage& its) {
    if (its != stage::under_way) return;
    try {
      if (receive.ready()) its = stage::here;
    } catch (...) {  // the transport knows that the rest is not wanted
      refused_ = true;
      throw;
    }
  }

  // The kernel multiplies the sum so far by one, which changes nothing, and rounds as in one pass.
  void fold(double weight, const_buffer before, const std::byte* arrived) {
    const kernel::weighted_input term{links_.sources[folded_].weight, arrived};
    context_->compute().mix(sum(), weight, before, std::span(&term, 1));
    ++folded_;
  }

  // Receives no more, and tells the transport that what is still to come is nobody's.
  void stop() noexcept {
    stopped_ = true;
    if (refused_ || folded_ == links_.sources.size()) return;
    try {
      if (first_stage_ != stage::under_way && later_stage_ != stage::under_way)
        first_ = receive(nullptr, 0, folded_);  // given up before anything is received
      first_.abandon();
      later_.abandon();
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
  turn turn_;
  native_operation sends_;
  native_operation first_;  // receives from the first source, where the sum will be,
  native_operation later_;  // and this from another one
  stage first_stage_ = stage::none;
  stage later_stage_ = stage::none;
  std::size_t folded_ = 0;  // sources
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
  folding<Backend> average(context, own, std::move(links), std::move(sum), std::move(its_turn),
                           std::move(exchange).submit());
  co_await average;
}

}  // namespace bluefog::detail
