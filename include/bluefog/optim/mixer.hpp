// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/dtype.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/core/unwinding.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/folding.hpp>
#include <bluefog/neighbor/hierarchical_allreduce.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/optim/agreeing_group.hpp>
#include <bluefog/optim/mixing_schedule.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/transfer.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/arguments.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/device.hpp>
#include <bluefog/tensor/dtype.hpp>
#include <bluefog/tensor/parcel.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog::optim::detail {

/// Averages values with those of other ranks, in two halves: `begin` and `send` send what is there
/// now and receive beside the computation; `apply` combines in place.
template <backend Backend, averaging_topology Topology>
class mixer {
 public:
  /// Values on their way, in one piece or in several, and what is to become of them.
  struct flight {
    struct piece {
      transfer way;
      std::shared_ptr<const bluefog::detail::parcel> values;
      std::shared_ptr<bluefog::detail::arrivals> arrived;
    };
    std::vector<piece> pieces;
    std::shared_ptr<const neighborhood> links;
    bool combined;  ///< whether the result arrives, not what it is made of
  };

  /// \param group  borrowed; must outlive the mixer.
  mixer(std::string_view optimizer, agreeing_group<Backend>& group, Topology topology,
        communication_type type)
      : optimizer_(optimizer),
        group_(&group),
        schedule_(optimizer, group, std::move(topology), type) {}
  mixer(const mixer&) = delete;
  mixer& operator=(const mixer&) = delete;
  /// As `drop`, so that ranks which withdraw meanwhile need not wait until their time is over;
  /// while an exception unwinds the stack, what is under way is left to the communicator.
  ~mixer() {
    if (!unwinding_.now()) drop();
  }

  [[nodiscard]] communicator<Backend>& comm() const noexcept { return group_->comm(); }

  // With whom: as `mixing_schedule`.
  [[nodiscard]] communication_type type() const noexcept { return schedule_.type(); }
  void type(communication_type next) { schedule_.type(next); }
  void next(neighborhood links) { schedule_.next(std::move(links)); }
  void on_round(std::function<neighborhood(std::int64_t)> choose) {
    schedule_.on_round(std::move(choose));
  }
  void global_every(int every) { schedule_.global_every(every); }

  [[nodiscard]] std::int64_t round() const noexcept { return schedule_.position().round; }
  /// \return the position that a communication which is under way began at.
  [[nodiscard]] mixing_position position() const noexcept {
    return started_ ? schedule_.before() : schedule_.position();
  }
  void position(mixing_position next) noexcept { schedule_.position(next); }
  /// \return whether something is under way that `apply` has to finish.
  [[nodiscard]] bool started() const noexcept { return started_; }
  /// \return whether what is under way goes to anybody.
  [[nodiscard]] bool sends() const noexcept { return now_.type != communication_type::none; }

  /// Begins a communication; then `send` each part, then `apply`.
  void begin() {
    drop();
    auto now = schedule_.begin();  // may throw
    group_->begin();
    now_ = std::move(now);
    // One of its own: parts of the last communication may be under way, and this one's wait for
    // other ranks to get through with those.
    if (busy(landing_)) std::swap(landing_, spare_);
    if (busy(landing_)) landing_ = std::make_shared<bluefog::detail::landing>();
    started_ = true;
  }

  /// Waits for what was sent and forgets it: the parameters stay as they are.
  void drop() noexcept {
    for (flight& each : flights_)
      for (auto& piece : each.pieces) group_->forget(piece.way);
    flights_.clear();
    started_ = false;
  }
  /// `drop`, after which the next communication is this one again. The same on every rank.
  void recall() noexcept {
    if (!started_) return;
    drop();
    schedule_.recall();
  }

  /// Sends `part` of the arena as it is now. It must not change before `apply`.
  void send(const parameter_arena& arena, const parameter_arena::range& part) {
    send(arena.slice(part));
  }
  /// Sends the elements of `values`, which is contiguous.
  void send(const at::Tensor& values) {
    if (!sends()) return;
    const auto type = dtype_from(values.scalar_type()).value();
    const bool combined = now_.type != communication_type::neighbor_allreduce ||
                          bluefog::detail::folds<Backend>(*now_.links, type);
    flight& made = flights_.emplace_back(flight{{}, now_.links, combined});
    const std::int64_t step = sends_pieces(type) ? piece_bytes / values.element_size()
                                                 : std::max<std::int64_t>(1, values.numel());
    for (std::int64_t begin = 0; begin < values.numel(); begin += step)
      send_piece(made, values.narrow(0, begin, std::min(step, values.numel() - begin)));
  }

  /// Waits for everything that was sent, then combines in place. All or nothing: if any part
  /// failed, no parameter has changed.
  void apply() {
    started_ = false;
    std::exception_ptr failure;
    for (flight& each : flights_)
      for (auto& piece : each.pieces) try {
          group_->wait(piece.way);
        } catch (...) {
          if (!failure) failure = std::current_exception();
        }
    const auto flights = std::exchange(flights_, {});
    if (failure) std::rethrow_exception(failure);
    for (const flight& each : flights) combine(each);
  }

  /// Waits for another operation on `comm()`.
  void wait(transfer& started) { group_->wait(started); }

  /// \return what is on its way, for the caller to `finish` part by part, in the order of sending;
  /// none if the communication is with nobody.
  [[nodiscard]] std::vector<flight> take() noexcept {
    started_ = false;
    return std::exchange(flights_, {});
  }
  /// Waits for one part, then combines it in place.
  void finish(flight& each) {
    for (auto& piece : each.pieces) group_->wait(piece.way);
    combine(each);
    each.pieces.clear();  // the memory can serve the next communication
  }

 private:
  // What is added up as it comes goes in pieces, so that a sum is still in the cache when its next
  // term comes, and nobody needs more memory than for the sums and two pieces. The pieces are the
  // same on all ranks, also on those that have one source.
  static constexpr std::int64_t piece_bytes = 1 << 20;
  [[nodiscard]] bool sends_pieces(dtype type) const noexcept {
    return now_.type == communication_type::neighbor_allreduce && schedule_.several_sources() &&
           bluefog::detail::foldable<Backend>(type);
  }

  void send_piece(flight& whole, const at::Tensor& values) {
    const auto arrived = std::make_shared<bluefog::detail::arrivals>();
    const const_buffer outline = bluefog::detail::outlines(bluefog::detail::only(values)).front();
    const call_options anonymous;
    if (now_.type == communication_type::neighbor_allreduce) {
      start(
          bluefog::detail::check_mix(comm(), optimizer_, outline, outline, *now_.links, anonymous),
          whole, values, arrived, [&](auto context, const auto& own) {
            if constexpr (!device_backend<Backend>)
              if (whole.combined)
                return bluefog::detail::fold_task(context, own.in(), *now_.links, arrived,
                                                  bluefog::detail::turn(landing_));
            return bluefog::detail::fetch_task(context, own.input(), own.layout(), *now_.links,
                                               arrived);
          });
      return;
    }
    const auto result = [&](const auto& context, const auto& own) {
      const auto& memory = arrived->emplace_back(context.scratch(own.layout().bytes, own.input()));
      return mutable_buffer{memory.data(), outline.count, outline.type};
    };
    if (now_.type == communication_type::allreduce) {
      start(bluefog::detail::check_allreduce(comm(), outline, outline, reduce_op::average, {}),
            whole, values, arrived, [&](auto context, const auto& own) {
              return bluefog::detail::allreduce_task(context, own.in(), result(context, own),
                                                     reduce_op::average, scope::all, arrived);
            });
      return;
    }
    neighborhood links = *now_.links;  // between machines; the check makes it one between ranks
    auto call = bluefog::detail::check_hierarchical(comm(), outline, outline, links, anonymous);
    start(std::move(call), whole, values, arrived, [&](auto context, const auto& own) {
      return bluefog::detail::hierarchical_task(context, {{own.in(), result(context, own)}}, links,
                                                arrived);
    });
  }

  // `make(context, parcel)` makes the task, which works on what the parcel holds.
  template <class Make>
  void start(call_description call, flight& whole, const at::Tensor& values,
             const std::shared_ptr<bluefog::detail::arrivals>& arrived, Make make) {
    bluefog::detail::name_caller_stream(comm(), values.device());
    std::shared_ptr<bluefog::detail::parcel> own;
    auto started = comm().start(std::move(call), [&](auto context) {
      const auto in = bluefog::detail::only(values);
      own = std::make_shared<bluefog::detail::parcel>(context, in, in);
      return bluefog::detail::run_with(context, make(context, *own), own);
    });
    whole.pieces.push_back(
        {transfer(comm().driver(), std::move(started)), std::move(own), arrived});
  }

  [[nodiscard]] static bool busy(const std::shared_ptr<bluefog::detail::landing>& it) noexcept {
    return it == nullptr || it.use_count() > 1;
  }

  void combine(const flight& each) const {
    for (const auto& [way, values, arrived] : each.pieces) {
      const bluefog::detail::parcel& own = *values;
      bluefog::detail::write_in_order(comm(), own, [&](auto compute) {
        if (each.combined)
          compute.copy({arrived->front().data(), own.out().count, own.out().type}, own.out());
        else
          bluefog::detail::combine(own.output(), own.output(), own.layout(), *each.links, *arrived,
                                   [&](auto... operands) { compute.mix(operands...); });
      });
    }
  }

  std::string_view optimizer_;
  agreeing_group<Backend>* group_;
  mixing_schedule<Backend, Topology> schedule_;
  typename mixing_schedule<Backend, Topology>::communication now_;  // begun last
  std::shared_ptr<bluefog::detail::landing> landing_;  // its parts receive there in turn
  std::shared_ptr<bluefog::detail::landing> spare_;
  bool started_ = false;
  std::vector<flight> flights_;
  bluefog::detail::unwinding unwinding_;
};

}  // namespace bluefog::optim::detail
