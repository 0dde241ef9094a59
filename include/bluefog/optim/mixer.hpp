// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/hierarchical_allreduce.hpp>
#include <bluefog/neighbor/links.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/optim/agreeing_group.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/transfer.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/arguments.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/device.hpp>
#include <bluefog/tensor/parcel.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog::optim {

/// Whom to average with in each communication: a graph, or a schedule of graphs.
template <class T>
concept averaging_topology = topology::graph<T> || topology::schedule<T>;

namespace detail {

/// \return whom `place` averages with in a round: of a graph in each the same.
template <averaging_topology Topology>
[[nodiscard]] neighborhood links_in_round(const Topology& topology, int place, std::int64_t round) {
  if constexpr (topology::graph<Topology>)
    return topology::neighborhood_of(topology, place);
  else
    return topology.rounds(place)[static_cast<std::ptrdiff_t>(round)];
}

/// \return how many places a topology for communications of this type has.
template <backend Backend>
[[nodiscard]] int places(const communicator<Backend>& comm, communication_type type) {
  return type == communication_type::hierarchical_neighbor_allreduce ? comm.machine_size()
                                                                     : comm.size();
}

/// How far the communications of an optimizer have come: what it has to save.
struct mixing_position {
  std::int64_t round = 0;           ///< of the schedule: neighbour communications
  std::int64_t communications = 0;  ///< of all types
};

/// Averages values with those of other ranks, in two halves: `begin` and `send` send what is there
/// now and receive beside the computation; `apply` combines in place.
template <backend Backend, averaging_topology Topology>
class mixer {
 public:
  /// Values on their way, and what is to become of them.
  struct flight {
    transfer way;
    communication_type type;
    std::shared_ptr<const bluefog::detail::parcel> values;
    std::shared_ptr<const neighborhood> links;
    std::shared_ptr<bluefog::detail::arrivals> arrived;
  };

  /// \param group  borrowed; must outlive the mixer.
  mixer(std::string_view optimizer, agreeing_group<Backend>& group, Topology topology,
        communication_type type)
      : optimizer_(optimizer), group_(&group), topology_(std::move(topology)), type_(type) {
    expect_fitting(type_);
  }

  [[nodiscard]] communicator<Backend>& comm() const noexcept { return group_->comm(); }
  [[nodiscard]] communication_type type() const noexcept { return type_; }
  void type(communication_type next) {
    expect_fitting(next);
    type_ = next;
  }
  /// Takes the place of the topology in the next communication.
  void next(neighborhood links) {
    bluefog::detail::validate(optimizer_, links, own_place(), places(comm(), type_));
    next_ = std::move(links);
  }
  /// Takes the place of the topology in every communication, if it is not empty.
  void on_round(std::function<neighborhood(std::int64_t)> choose) { choose_ = std::move(choose); }
  /// Every `every`-th communication averages over all ranks; 0: none does.
  void global_every(int every) {
    expects(every >= 0, optimizer_, ": global_average_every must not be negative, got ", every);
    global_every_ = every;
  }

  [[nodiscard]] std::int64_t round() const noexcept { return position_.round; }
  /// \return the position that a communication which is under way began at.
  [[nodiscard]] mixing_position position() const noexcept { return started_ ? before_ : position_; }
  void position(mixing_position next) noexcept { position_ = next; }
  /// \return whether something is under way that `apply` has to finish.
  [[nodiscard]] bool started() const noexcept { return started_; }

  /// Begins a communication; then `send` each part, then `apply`.
  void begin() {
    drop();
    group_->begin();
    const mixing_position before = position_;
    current_ = type_;
    if (type_ != communication_type::none) {
      ++position_.communications;
      if (global_every_ > 0 && position_.communications % global_every_ == 0)
        current_ = communication_type::allreduce;
    }
    if (current_ == communication_type::neighbor_allreduce ||
        current_ == communication_type::hierarchical_neighbor_allreduce) {
      // The round passes even where the schedule is overridden: other ranks may follow it.
      links_ = std::make_shared<const neighborhood>(next_     ? *next_
                                                    : choose_ ? chosen(before.round)
                                                              : of_round(before.round));
      used_ = std::exchange(next_, std::nullopt);
      ++position_.round;
    }
    before_ = before;
    started_ = true;
  }

  /// Waits for what was sent and forgets it: the parameters stay as they are.
  void drop() noexcept {
    for (flight& each : flights_) group_->forget(each.way);
    flights_.clear();
    started_ = false;
  }
  /// `drop`, after which the next communication is this one again. The same on every rank.
  void recall() noexcept {
    if (!started_) return;
    drop();
    position_ = before_;
    if (!next_) next_ = std::exchange(used_, std::nullopt);
  }

  /// Sends `part` of the arena as it is now. It must not change before `apply`.
  void send(const parameter_arena& arena, const parameter_arena::range& part) {
    send(arena.slice(part));
  }
  /// Sends the elements of `values`, which is contiguous.
  void send(const at::Tensor& values) {
    if (current_ == communication_type::none) return;
    const auto arrived = std::make_shared<bluefog::detail::arrivals>();
    const const_buffer outline = bluefog::detail::outlines(bluefog::detail::only(values)).front();
    const call_options anonymous;
    if (current_ == communication_type::neighbor_allreduce) {
      start(bluefog::detail::check_mix(comm(), optimizer_, outline, outline, *links_, anonymous),
            values, arrived, [&](auto context, const auto& own) {
              return bluefog::detail::fetch_task(context, own.input(), own.layout(), *links_,
                                                 arrived, nullptr);
            });
      return;
    }
    const auto result = [&](const auto& context, const auto& own) {
      const auto& memory = arrived->emplace_back(context.scratch(own.layout().bytes, own.input()));
      return mutable_buffer{memory.data(), outline.count, outline.type};
    };
    if (current_ == communication_type::allreduce) {
      start(bluefog::detail::check_allreduce(comm(), outline, outline, reduce_op::average, {}),
            values, arrived, [&](auto context, const auto& own) {
              return bluefog::detail::allreduce_task(context, own.in(), result(context, own),
                                                     reduce_op::average, scope::all, arrived);
            });
      return;
    }
    neighborhood links = *links_;  // between machines; the check makes it one between ranks
    auto call = bluefog::detail::check_hierarchical(comm(), outline, outline, links, anonymous);
    start(std::move(call), values, arrived, [&](auto context, const auto& own) {
      return bluefog::detail::hierarchical_task(context, own.in(), result(context, own), links,
                                                arrived);
    });
  }

  /// Waits for everything that was sent, then combines in place. All or nothing: if any part
  /// failed, no parameter has changed.
  void apply() {
    started_ = false;
    std::exception_ptr failure;
    for (flight& each : flights_) {
      try {
        group_->wait(each.way);
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
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
    group_->wait(each.way);
    combine(each);
  }

 private:
  // `make(context, parcel)` makes the task, which works on what the parcel holds.
  template <class Make>
  void start(call_description call, const at::Tensor& values,
             const std::shared_ptr<bluefog::detail::arrivals>& arrived, Make make) {
    bluefog::detail::name_caller_stream(comm(), values.device());
    std::shared_ptr<bluefog::detail::parcel> own;
    auto started = comm().start(std::move(call), [&](auto context) {
      const auto in = bluefog::detail::only(values);
      own = std::make_shared<bluefog::detail::parcel>(context, in, in);
      return bluefog::detail::run_with(context, make(context, *own), own);
    });
    flights_.push_back(
        {transfer(comm().driver(), std::move(started)), current_, std::move(own), links_, arrived});
  }

  void combine(const flight& each) const {
    const bluefog::detail::parcel& own = *each.values;
    bluefog::detail::write_in_order(comm(), own, [&](auto compute) {
      if (each.type == communication_type::neighbor_allreduce)
        bluefog::detail::combine(own.output(), own.output(), own.layout(), *each.links,
                                 *each.arrived,
                                 [&](auto... operands) { compute.mix(operands...); });
      else
        compute.copy({each.arrived->front().data(), own.out().count, own.out().type}, own.out());
    });
  }

  [[nodiscard]] bool hierarchical() const noexcept {
    return type_ == communication_type::hierarchical_neighbor_allreduce;
  }
  [[nodiscard]] int own_place() const {
    return hierarchical() ? comm().machine_rank() : comm().rank();
  }

  [[nodiscard]] neighborhood chosen(std::int64_t round) const {
    neighborhood links = choose_(round);
    bluefog::detail::validate(optimizer_, links, own_place(), places(comm(), type_));
    return links;
  }

  [[nodiscard]] neighborhood of_round(std::int64_t round) const {
    expect_fitting(type_);
    return links_in_round(topology_, own_place(), round);
  }

  void expect_fitting(communication_type type) const {
    if (choose_) return;  // what it answers is looked at each time
    if (type == communication_type::neighbor_allreduce)
      expects(topology_.size() == comm().size(), optimizer_, ": the topology has ",
              topology_.size(), " ranks, the communicator has ", comm().size());
    if (type == communication_type::hierarchical_neighbor_allreduce) {
      expects(comm().is_homogeneous(), optimizer_,
              ": machines differ: ", comm().layout().to_string());
      expects(topology_.size() == comm().machine_size(), optimizer_, ": the topology has ",
              topology_.size(), " machines, the communicator has ", comm().machine_size());
    }
  }

  std::string_view optimizer_;
  agreeing_group<Backend>* group_;
  Topology topology_;
  communication_type type_;
  communication_type current_ = type_;  // of the communication that has begun last
  int global_every_ = 0;
  std::function<neighborhood(std::int64_t)> choose_;
  std::optional<neighborhood> next_;
  std::optional<neighborhood> used_;  // what was next when the last communication began
  std::shared_ptr<const neighborhood> links_;
  mixing_position position_;
  mixing_position before_;
  bool started_ = false;
  std::vector<flight> flights_;
};

}  // namespace detail
}  // namespace bluefog::optim
