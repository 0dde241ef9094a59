// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/hierarchical_allreduce.hpp>
#include <bluefog/neighbor/links.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/transfer.hpp>
#include <bluefog/tensor/arena.hpp>
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
    mutable_buffer values;
    std::shared_ptr<const neighborhood> links;
    std::shared_ptr<bluefog::detail::arrivals> arrived;
  };

  mixer(std::string_view optimizer, communicator<Backend>& comm, Topology topology,
        communication_type type)
      : optimizer_(optimizer), comm_(&comm), topology_(std::move(topology)), type_(type) {
    expect_fitting(type_);
  }

  [[nodiscard]] communicator<Backend>& comm() const noexcept { return *comm_; }
  [[nodiscard]] communication_type type() const noexcept { return type_; }
  void type(communication_type next) {
    expect_fitting(next);
    type_ = next;
  }
  /// What else check mode compares over ranks: whose values travel.
  void owners(std::string names) { owners_ = std::move(names); }
  /// Takes the place of the topology in the next communication.
  void next(neighborhood links) {
    bluefog::detail::validate(optimizer_, links, own_place(), places(*comm_, type_));
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
    for (flight& each : flights_) try {
        each.way.wait();
      } catch (const std::exception&) {  // what it would have brought is not wanted
      }
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
    send(arena.buffer(part), arena.block(part.block));
  }
  /// Sends `values`, in the memory of `owner`, which late transfers may still read.
  void send(mutable_buffer values, const at::Tensor& owner) {
    if (current_ == communication_type::none) return;
    auto arrived = std::make_shared<bluefog::detail::arrivals>();
    const call_options anonymous;
    if (current_ == communication_type::neighbor_allreduce) {
      start(bluefog::detail::check_mix(*comm_, optimizer_, values, values, *links_, anonymous),
            values, arrived, [&](auto context) {
              return bluefog::detail::fetch_task(context, values.data,
                                                 bluefog::detail::packed_layout(values), *links_,
                                                 arrived, owner);
            });
      return;
    }
    arrived->push_back(scratch_.acquire(values.bytes()));
    const mutable_buffer result{arrived->front().data(), values.count, values.type};
    const auto owners = std::pair(owner, arrived);
    if (current_ == communication_type::allreduce) {
      start(bluefog::detail::check_allreduce(*comm_, values, result, reduce_op::average, {}),
            values, arrived, [&](auto context) {
              return bluefog::detail::allreduce_task(context, values, result, reduce_op::average,
                                                     scope::all, owners);
            });
      return;
    }
    neighborhood links = *links_;  // between machines; the check makes it one between ranks
    auto call = bluefog::detail::check_hierarchical(*comm_, values, result, links, anonymous);
    start(std::move(call), values, arrived, [&](auto context) {
      return bluefog::detail::hierarchical_task(context, values, result, links, owners);
    });
  }

  /// Waits for everything that was sent, then combines in place. All or nothing: if any part
  /// failed, no parameter has changed.
  void apply() {
    started_ = false;
    std::exception_ptr failure;
    for (flight& each : flights_) {
      try {
        each.way.wait();
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    const auto flights = std::exchange(flights_, {});
    if (failure) std::rethrow_exception(failure);
    for (const flight& each : flights) combine(each);
  }

  /// \return what is on its way, for the caller to `finish` part by part, in the order of sending;
  /// none if the communication is with nobody.
  [[nodiscard]] std::vector<flight> take() noexcept {
    started_ = false;
    return std::exchange(flights_, {});
  }
  /// Waits for one part, then combines it in place.
  static void finish(flight& each) {
    each.way.wait();
    combine(each);
  }

 private:
  template <class Make>
  void start(call_description call, mutable_buffer values,
             std::shared_ptr<bluefog::detail::arrivals> arrived, Make make) {
    call.agreement += owners_;
    auto started = comm_->start(std::move(call), std::move(make));
    flights_.push_back({transfer(comm_->driver(), std::move(started)), current_, values, links_,
                        std::move(arrived)});
  }

  static void combine(const flight& each) {
    if (each.type == communication_type::neighbor_allreduce)
      bluefog::detail::combine(each.values.data, each.values.data,
                               bluefog::detail::packed_layout(each.values), *each.links,
                               *each.arrived);
    else
      bluefog::detail::copy({each.arrived->front().data(), each.values.count, each.values.type},
                            each.values);
  }

  [[nodiscard]] bool hierarchical() const noexcept {
    return type_ == communication_type::hierarchical_neighbor_allreduce;
  }
  [[nodiscard]] int own_place() const {
    return hierarchical() ? comm_->machine_rank() : comm_->rank();
  }

  [[nodiscard]] neighborhood chosen(std::int64_t round) const {
    neighborhood links = choose_(round);
    bluefog::detail::validate(optimizer_, links, own_place(), places(*comm_, type_));
    return links;
  }

  [[nodiscard]] neighborhood of_round(std::int64_t round) const {
    expect_fitting(type_);
    return links_in_round(topology_, own_place(), round);
  }

  void expect_fitting(communication_type type) const {
    if (choose_) return;  // what it answers is looked at each time
    if (type == communication_type::neighbor_allreduce)
      expects(topology_.size() == comm_->size(), optimizer_, ": the topology has ",
              topology_.size(), " ranks, the communicator has ", comm_->size());
    if (type == communication_type::hierarchical_neighbor_allreduce) {
      expects(comm_->is_homogeneous(), optimizer_,
              ": machines differ: ", comm_->layout().to_string());
      expects(topology_.size() == comm_->machine_size(), optimizer_, ": the topology has ",
              topology_.size(), " machines, the communicator has ", comm_->machine_size());
    }
  }

  std::string_view optimizer_;
  communicator<Backend>* comm_;
  Topology topology_;
  communication_type type_;
  communication_type current_ = type_;  // of the communication that has begun last
  int global_every_ = 0;
  std::string owners_;
  std::function<neighborhood(std::int64_t)> choose_;
  std::optional<neighborhood> next_;
  std::optional<neighborhood> used_;  // what was next when the last communication began
  std::shared_ptr<const neighborhood> links_;
  mixing_position position_;
  mixing_position before_;
  bool started_ = false;
  scratch_pool scratch_;
  std::vector<flight> flights_;
};

}  // namespace detail
}  // namespace bluefog::optim
