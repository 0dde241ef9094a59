// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <bluefog/backend/agreed_calls.hpp>
#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/engine.hpp>
#include <bluefog/backend/lane.hpp>
#include <bluefog/backend/layout.hpp>
#include <bluefog/backend/options.hpp>
#include <bluefog/backend/statistics.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/core/unwinding.hpp>

namespace bluefog {

namespace detail {

/// \return what drives a communicator that is made from no other. Where the transport serves one
///         thread only, all of that thread share one, so that its waits make progress for all.
[[nodiscard]] inline std::shared_ptr<engine> engine_for(bool any_thread) {
  if (any_thread) return std::make_shared<engine>(true);
  static thread_local std::weak_ptr<engine> of_thread;
  auto shared = of_thread.lock();
  if (!shared) of_thread = shared = std::make_shared<engine>(false);
  return shared;
}

}  // namespace detail

/// Everything a communicator owns, at one address for as long as it lives.
///
/// Destroying it waits for its operations; while an exception unwinds the stack it gives them up
/// instead, since the other ranks may never answer.
template <backend Backend>
class communicator_state final : public lane {
 public:
  /// \param driver    of the communicator that this one is made from, if any.
  /// \param counters  likewise, if this one counts for that one.
  communicator_state(Backend transport, communicator_options options,
                     std::shared_ptr<engine> driver, std::shared_ptr<traffic> counters)
      : lane({options.timeout, options.stall_warning}, device_backend<Backend>),
        transport_(std::move(transport)),
        options_(options),
        driver_(driver ? std::move(driver) : detail::engine_for(transport_.any_thread())),
        counters_(counters ? std::move(counters) : std::make_shared<traffic>()),
        answered_(static_cast<std::size_t>(transport_.size()), 0),
        heard_(answered_),
        asked_(answered_) {}
  communicator_state(const communicator_state&) = delete;
  communicator_state& operator=(const communicator_state&) = delete;
  ~communicator_state() override { driver_->drain(*this, unwinding_.now()); }

  [[nodiscard]] Backend& transport() noexcept { return transport_; }
  [[nodiscard]] const Backend& transport() const noexcept { return transport_; }
  [[nodiscard]] const communicator_options& options() const noexcept { return options_; }
  [[nodiscard]] const std::shared_ptr<engine>& driver() const noexcept { return driver_; }
  [[nodiscard]] traffic& counters() const noexcept { return *counters_; }
  [[nodiscard]] const std::shared_ptr<traffic>& shared_counters() const noexcept {
    return counters_;
  }
  [[nodiscard]] scratch_pool& scratch() noexcept { return scratch_; }
  /// Of whoever advances operations of all ranks, one at a time.
  [[nodiscard]] agreed_calls& agreed() noexcept { return agreed_; }
  [[nodiscard]] const machine_layout& layout() const noexcept { return layout_; }
  void layout(machine_layout machines) { layout_ = std::move(machines); }

  /// The number that the next operation of all ranks gets.
  [[nodiscard]] std::uint64_t& next_number() noexcept { return next_number_; }
  /// The number that the next operation with `peer` gets.
  [[nodiscard]] std::uint64_t& next_number(int peer) { return next_pair_number_[peer]; }
  [[nodiscard]] std::uint64_t next_subset() noexcept { return subsets_++; }
  [[nodiscard]] std::uint64_t oldest(std::uint64_t number) {
    return driver_->oldest(*this, number);
  }

  void announce(std::uint64_t number) override {
    const std::scoped_lock lock(letters_);
    if constexpr (letter_backend<Backend>)
      for (int peer = 0; peer < transport_.size(); ++peer)
        if (peer != transport_.rank()) tell(peer, number);
  }

  void listen(std::uint64_t number) override {
    const std::scoped_lock lock(letters_);
    if constexpr (letter_backend<Backend>) {
      while (const auto arrived = transport_.collect()) {
        if ((arrived->number & withdrawal) != 0) {
          note_withdrawal(arrived->number & ~withdrawal);
          continue;
        }
        auto& heard = heard_[static_cast<std::size_t>(arrived->sender)];
        heard = std::max(heard, arrived->number + 1);
        auto& asked = asked_[static_cast<std::size_t>(arrived->sender)];
        asked = std::max(asked, arrived->number + 1);
      }
      // Also those who asked when this rank was not there yet.
      for (int peer = 0; peer < transport_.size(); ++peer)
        if (auto& asked = asked_[static_cast<std::size_t>(peer)];
            asked > 0 && asked <= number + 1) {
          asked = 0;
          tell(peer, number);
        }
    }
  }

  [[nodiscard]] std::vector<int> silent(std::uint64_t number) const override {
    const std::scoped_lock lock(letters_);
    std::vector<int> ranks;
    if constexpr (letter_backend<Backend>)
      for (int peer = 0; peer < transport_.size(); ++peer)
        if (peer != transport_.rank() && heard_[static_cast<std::size_t>(peer)] <= number)
          ranks.push_back(peer);
    return ranks;
  }

  /// Takes no part in the next operation and those after it, nor in those that another rank has
  /// withdrawn from, and tells the other ranks.
  void withdraw() {
    const std::scoped_lock lock(letters_);
    if constexpr (letter_backend<Backend>) {
      const std::uint64_t first = std::min(next_number_, withdrawn_.load());
      for (int peer = 0; peer < transport_.size(); ++peer)
        if (peer != transport_.rank()) transport_.post(peer, withdrawal | first);
    }
  }
  /// The next operation gets a number later.
  void pass() noexcept { ++next_number_; }
  /// \return whether a rank is known to take no part in operation `number`.
  [[nodiscard]] bool lacks_rank(std::uint64_t number) const noexcept {
    return withdrawn_.load() <= number;
  }

  [[nodiscard]] int rank_of_lane() const noexcept override { return transport_.rank(); }

 private:
  static constexpr std::uint64_t withdrawal = std::uint64_t{1} << 63;  // marks such a letter
  static constexpr std::uint64_t nobody = ~std::uint64_t{0};

  void note_withdrawal(std::uint64_t number) noexcept {
    if (number < withdrawn_.load()) withdrawn_ = number;
  }

  // Once per peer and number, so that two waiting ranks do not answer each other for ever.
  void tell(int peer, std::uint64_t number)
    requires letter_backend<Backend>
  {
    auto& answered = answered_[static_cast<std::size_t>(peer)];
    if (answered > number) return;
    answered = number + 1;
    transport_.post(peer, number);
  }

  Backend transport_;
  communicator_options options_;
  std::shared_ptr<engine> driver_;
  std::shared_ptr<traffic> counters_;
  machine_layout layout_;
  scratch_pool scratch_;
  agreed_calls agreed_;
  std::uint64_t next_number_ = 0;
  std::map<int, std::uint64_t> next_pair_number_;
  std::uint64_t subsets_ = 0;
  mutable std::mutex letters_;           // any thread may read them
  std::vector<std::uint64_t> answered_;  // per rank: one more than the last number told to it
  std::vector<std::uint64_t> heard_;     // per rank: one more than the last number it told
  std::vector<std::uint64_t> asked_;     // likewise, 0 once it has been answered
  std::atomic<std::uint64_t> withdrawn_ = nobody;  // the first operation that some rank is not in
  detail::unwinding unwinding_;
};

}  // namespace bluefog
