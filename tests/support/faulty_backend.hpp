// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog_test {

/// What a `faulty_backend` does, as a pure function of the seed, the rank and the message.
struct faults {
  std::uint64_t seed = 0;
  /// Each message is handed to the transport only after up to so many tests of its operation, and
  /// is noticed to be over only after as many more.
  int delay = 0;
  /// Messages of one exchange to or from different ranks start in any order, one by one.
  bool reorder = false;
  /// How likely it is that whatever a rank sends to another one in an operation goes into the void;
  /// only in operations with a number in [drop_from, drop_before). Number 0 sets a communicator up.
  double drop = 0;
  std::uint64_t drop_from = 1;
  std::uint64_t drop_before = ~std::uint64_t{0};
  /// The rank that dies, -1 for none, and how many messages it sends before.
  int victim = -1;
  std::int64_t kill_after = 0;
  /// Whether the dead rank finds out, by `peer_error`s, or nothing happens to it any more.
  bool dead_knows = true;
};

/// What the operations of one rank share.
class fault_state {
 public:
  fault_state(faults what, int rank) : what_(what), rank_(rank) {}

  [[nodiscard]] const faults& what() const noexcept { return what_; }

  /// \return a number in [0, below) that depends on what is asked about only.
  [[nodiscard]] std::uint64_t draw(std::uint64_t below, std::uint64_t a, std::uint64_t b,
                                   std::uint64_t c, std::uint64_t d) const noexcept {
    std::uint64_t x = what_.seed;
    for (const std::uint64_t each : {static_cast<std::uint64_t>(rank_), a, b, c, d}) {
      x += 0x9E3779B97F4A7C15U + each;  // the finaliser of splitmix64
      x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
      x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
      x ^= x >> 31;
    }
    return below == 0 ? 0 : x % below;
  }

  /// Counts a message. \return whether the rank is still alive to send it.
  bool sends() noexcept {
    if (rank_ != what_.victim) return true;
    return sent_.fetch_add(1) < what_.kill_after;
  }
  [[nodiscard]] bool dead() const noexcept {
    return rank_ == what_.victim && sent_.load() > what_.kill_after;
  }

  /// Operations in the making or in flight.
  std::atomic<int> living = 0;

 private:
  faults what_;
  int rank_;
  std::atomic<std::int64_t> sent_ = 0;
};

/// Counts the operations that are alive, through moves.
class living_mark {
 public:
  living_mark() noexcept = default;
  explicit living_mark(std::shared_ptr<fault_state> home) noexcept : home_(std::move(home)) {
    home_->living.fetch_add(1);
  }
  living_mark(living_mark&&) noexcept = default;
  living_mark& operator=(living_mark&& other) noexcept {
    std::swap(home_, other.home_);
    return *this;
  }
  living_mark(const living_mark&) = delete;
  living_mark& operator=(const living_mark&) = delete;
  ~living_mark() {
    if (home_) home_->living.fetch_sub(1);
  }

 private:
  std::shared_ptr<fault_state> home_;
};

/// Messages of a `faulty_backend` in flight, each an exchange of its own.
template <bluefog::backend Inner>
class faulty_operation {
 public:
  using native_exchange = decltype(std::declval<Inner&>().exchange(bluefog::message_tag{}));
  using native_operation = typename Inner::operation_type;

  /// One message, or a native collective.
  struct part {
    std::optional<native_exchange> waiting;  // not handed over yet
    native_operation native = {};
    int peer = 0;
    int delay = 0;  // tests until it is handed over
    int late = 0;   // tests until it is noticed to be over
    bool over = false;
    std::exception_ptr failure = nullptr;
  };

  faulty_operation() = default;
  faulty_operation(std::shared_ptr<fault_state> state, std::vector<part> parts)
      : state_(std::move(state)), mark_(state_), parts_(std::move(parts)) {}
  faulty_operation(faulty_operation&&) noexcept = default;
  faulty_operation& operator=(faulty_operation&&) noexcept = default;
  faulty_operation(const faulty_operation&) = delete;
  faulty_operation& operator=(const faulty_operation&) = delete;
  ~faulty_operation() = default;

  [[nodiscard]] bool ready() {
    if (!state_) return true;
    if (state_->dead() && !abandoned_) {
      if (!state_->what().dead_knows) return false;
      fail(std::make_exception_ptr(bluefog::peer_error("this rank has been killed")));
    }
    for (part& each : parts_) advance(each);
    if (!std::ranges::all_of(parts_, &part::over)) return false;
    state_ = nullptr;
    mark_ = {};
    if (failure_ && !abandoned_) std::rethrow_exception(std::exchange(failure_, nullptr));
    return true;
  }

  void abandon() noexcept {
    if (!state_) return;
    abandoned_ = true;
    withdraw();
  }

  [[nodiscard]] std::vector<int> waiting_for() const {
    std::vector<int> ranks;
    if (!state_) return ranks;
    for (const part& each : parts_)
      if (!each.over) ranks.push_back(each.peer);
    std::ranges::sort(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

 private:
  void advance(part& each) {
    if (each.over) return;
    try {
      if (each.waiting) {
        if (each.delay-- > 0) return;
        each.native = std::move(*each.waiting).submit();
        each.waiting.reset();
      }
      if (!each.native.ready() || each.late-- > 0) return;
      each.over = true;
    } catch (...) {
      each.over = true;
      fail(std::current_exception());
    }
  }

  // Nothing may be in flight when the failure is thrown, so the rest is asked back first.
  void fail(std::exception_ptr why) {
    if (failure_) return;
    failure_ = std::move(why);
    withdraw();
  }

  void withdraw() noexcept {
    for (part& each : parts_) {
      if (each.over) continue;
      each.late = static_cast<int>(parts_.size()) % 3;  // it takes a while to let go
      if (each.waiting) {
        each.waiting.reset();
        each.native = {};
      } else {
        each.native.abandon();
      }
    }
  }

  std::shared_ptr<fault_state> state_;  // null once complete
  living_mark mark_;
  std::vector<part> parts_;
  std::exception_ptr failure_;
  bool abandoned_ = false;
};

/// Collects the messages of one operation of a `faulty_backend`.
template <bluefog::backend Inner>
class faulty_exchange {
 public:
  using operation = faulty_operation<Inner>;

  faulty_exchange(Inner& transport, bluefog::message_tag tag, std::shared_ptr<fault_state> state)
      : transport_(&transport), tag_(tag), state_(std::move(state)) {}

  void send(bluefog::const_buffer in, int peer) {
    auto& each = next(peer, 0);
    const auto& what = state_->what();
    const double chance = 1e-6 * static_cast<double>(draw(1000000, 0, peer, 3));
    const bool exposed = tag_.number >= what.drop_from && tag_.number < what.drop_before;
    const bool lost = exposed && chance < what.drop;
    if (state_->sends() && !lost) {
      each.waiting->send(in, peer);
    } else {  // as if it had left
      each.waiting.reset();
      each.over = true;
    }
  }
  void receive(bluefog::mutable_buffer out, int peer) { next(peer, 1).waiting->receive(out, peer); }

  [[nodiscard]] operation submit() && {
    if (state_->what().reorder) {
      // Only messages of one pair and direction have an order among themselves.
      std::ranges::stable_sort(parts_, {}, [&](const planned& each) {
        return draw(1U << 20U, each.direction, each.message.peer, 4);
      });
    }
    std::vector<typename operation::part> parts;
    for (planned& each : parts_) {
      auto& part = parts.emplace_back(std::move(each.message));
      if (!part.waiting || part.delay > 0) continue;
      part.native = std::move(*part.waiting).submit();
      part.waiting.reset();
    }
    return {std::move(state_), std::move(parts)};
  }

 private:
  struct planned {
    typename operation::part message;
    std::uint64_t direction;
  };

  [[nodiscard]] std::uint64_t draw(std::uint64_t below, std::uint64_t what, int peer,
                                   std::uint64_t purpose) const {
    return state_->draw(below, tag_.number * 2 + (tag_.kind == bluefog::channel::pair ? 1 : 0),
                        what, static_cast<std::uint64_t>(peer), purpose);
  }

  typename operation::part& next(int peer, std::uint64_t direction) {
    const auto most = static_cast<std::uint64_t>(state_->what().delay) + 1;
    auto& each = parts_.emplace_back();
    each.direction = direction;
    each.message.waiting.emplace(transport_->exchange(tag_));
    each.message.peer = peer;
    each.message.delay = static_cast<int>(draw(most, direction, peer, 1));
    each.message.late = static_cast<int>(draw(most, direction, peer, 2));
    return each.message;
  }

  Inner* transport_;
  bluefog::message_tag tag_;
  std::shared_ptr<fault_state> state_;
  std::vector<planned> parts_;
};

/// A transport that behaves as badly as its concept allows, and worse, after a seed.
///
/// Models the capabilities of `Inner`. Letters arrive, except from and to a rank that is dead.
template <bluefog::backend Inner>
class faulty_backend {
 public:
  using operation_type = faulty_operation<Inner>;
  static constexpr std::string_view name = Inner::name;
  static constexpr bluefog::memory_space space = Inner::space;

  faulty_backend(Inner transport, faults what)
      : faulty_backend(std::move(transport), nullptr, what) {}

  [[nodiscard]] int rank() const noexcept { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept { return inner_.size(); }
  [[nodiscard]] int machine() const noexcept { return inner_.machine(); }
  [[nodiscard]] bool any_thread() const noexcept { return inner_.any_thread(); }
  /// \return what the operations share; lives on after the backend, for looking.
  [[nodiscard]] const std::shared_ptr<fault_state>& state() const noexcept { return state_; }

  [[nodiscard]] faulty_exchange<Inner> exchange(bluefog::message_tag tag) {
    return {inner_, tag, state_};
  }
  [[nodiscard]] faulty_backend subset(std::span<const int> members, std::uint64_t serial) {
    return {inner_.subset(members, serial), state_, state_->what()};
  }

  [[nodiscard]] bool reduces(bluefog::reduce_op op, bluefog::dtype type) const noexcept
    requires bluefog::allreducing_backend<Inner>
  {
    return inner_.reduces(op, type);
  }
  [[nodiscard]] operation_type allreduce(bluefog::const_buffer in, bluefog::mutable_buffer out,
                                         bluefog::reduce_op op)
    requires bluefog::allreducing_backend<Inner>
  {
    return whole(inner_.allreduce(in, out, op));
  }
  [[nodiscard]] operation_type broadcast(bluefog::mutable_buffer values, int root)
    requires bluefog::broadcasting_backend<Inner>
  {
    return whole(inner_.broadcast(values, root));
  }
  [[nodiscard]] operation_type allgather(bluefog::const_buffer in, bluefog::mutable_buffer out,
                                         std::span<const std::int64_t> counts)
    requires bluefog::gathering_backend<Inner>
  {
    return whole(inner_.allgather(in, out, counts));
  }

  void post(int peer, std::uint64_t number)
    requires bluefog::letter_backend<Inner>
  {
    if (!state_->dead()) inner_.post(peer, number);
  }
  [[nodiscard]] std::optional<bluefog::letter> collect()
    requires bluefog::letter_backend<Inner>
  {
    return state_->dead() ? std::nullopt : inner_.collect();
  }

 private:
  faulty_backend(Inner transport, std::shared_ptr<fault_state> state, faults what)
      : inner_(std::move(transport)),
        state_(state ? std::move(state) : std::make_shared<fault_state>(what, inner_.rank())) {}

  // Native collectives can only be noticed late.
  [[nodiscard]] operation_type whole(typename Inner::operation_type native) {
    std::vector<typename operation_type::part> parts(1);
    parts[0].native = std::move(native);
    parts[0].late = state_->what().delay;
    return {state_, std::move(parts)};
  }

  Inner inner_;
  std::shared_ptr<fault_state> state_;
};

}  // namespace bluefog_test
