// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
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

/// \return how many places a topology for communications of this type has.
template <backend Backend>
[[nodiscard]] int places(const communicator<Backend>& comm, communication_type type) {
  return type == communication_type::hierarchical_neighbor_allreduce ? comm.machine_size()
                                                                     : comm.size();
}

/// Averages parameters in an arena with those of other ranks, in two halves: `begin` and `send`
/// send what is there now and receive beside the computation; `apply` combines in place.
template <backend Backend, averaging_topology Topology>
class mixer {
 public:
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
  /// Takes the place of the topology in the next communication.
  void next(neighborhood links) {
    bluefog::detail::validate(optimizer_, links, own_place(), places(*comm_, type_));
    next_ = std::move(links);
  }
  [[nodiscard]] std::int64_t round() const noexcept { return round_; }
  void round(std::int64_t next) noexcept { round_ = next; }
  /// \return whether something is under way that `apply` has to finish.
  [[nodiscard]] bool started() const noexcept { return started_; }

  /// Begins a communication; then `send` each part, then `apply`.
  void begin() {
    drop();
    if (type_ == communication_type::neighbor_allreduce ||
        type_ == communication_type::hierarchical_neighbor_allreduce) {
      // The round passes even where the schedule is overridden: other ranks may follow it.
      links_ = next_ ? *next_ : of_round(round_);
      next_.reset();
      ++round_;
    }
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

  /// Sends `part` of the arena as it is now. It must not change before `apply`.
  void send(const parameter_arena& arena, const parameter_arena::range& part) {
    if (type_ == communication_type::none) return;
    const mutable_buffer values = arena.buffer(part);
    const at::Tensor owner = arena.block(part.block);  // late transfers may still read it
    auto arrived = std::make_shared<bluefog::detail::arrivals>();
    const call_options anonymous;
    if (type_ == communication_type::neighbor_allreduce) {
      start(bluefog::detail::check_mix(*comm_, optimizer_, values, values, links_, anonymous),
            values, arrived, [&](auto context) {
              return bluefog::detail::fetch_task(context, values.data,
                                                 bluefog::detail::packed_layout(values), links_,
                                                 arrived, owner);
            });
      return;
    }
    arrived->push_back(scratch_.acquire(values.bytes()));
    const mutable_buffer result{arrived->front().data(), values.count, values.type};
    const auto owners = std::pair(owner, arrived);
    if (type_ == communication_type::allreduce) {
      start(bluefog::detail::check_allreduce(*comm_, values, result, reduce_op::average, {}),
            values, arrived, [&](auto context) {
              return bluefog::detail::allreduce_task(context, values, result, reduce_op::average,
                                                     scope::all, owners);
            });
      return;
    }
    neighborhood links = links_;  // between machines; the check makes it one between ranks
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
    for (const flight& each : flights) {
      if (each.type == communication_type::neighbor_allreduce)
        bluefog::detail::combine(each.values.data, each.values.data,
                                 bluefog::detail::packed_layout(each.values), links_,
                                 *each.arrived);
      else
        bluefog::detail::copy({each.arrived->front().data(), each.values.count, each.values.type},
                              each.values);
    }
  }

 private:
  struct flight {
    transfer way;
    communication_type type;
    mutable_buffer values;
    std::shared_ptr<bluefog::detail::arrivals> arrived;
  };

  template <class Make>
  void start(call_description call, mutable_buffer values,
             std::shared_ptr<bluefog::detail::arrivals> arrived, Make make) {
    auto started = comm_->start(std::move(call), std::move(make));
    flights_.push_back(
        {transfer(comm_->driver(), std::move(started)), type_, values, std::move(arrived)});
  }

  [[nodiscard]] bool hierarchical() const noexcept {
    return type_ == communication_type::hierarchical_neighbor_allreduce;
  }
  [[nodiscard]] int own_place() const {
    return hierarchical() ? comm_->machine_rank() : comm_->rank();
  }

  [[nodiscard]] neighborhood of_round(std::int64_t round) const {
    if constexpr (topology::graph<Topology>)
      return topology::neighborhood_of(topology_, own_place());
    else
      return topology_.rounds(own_place())[static_cast<std::ptrdiff_t>(round)];
  }

  void expect_fitting(communication_type type) const {
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
  std::optional<neighborhood> next_;
  neighborhood links_;
  std::int64_t round_ = 0;
  bool started_ = false;
  scratch_pool scratch_;
  std::vector<flight> flights_;
};

}  // namespace detail
}  // namespace bluefog::optim
