// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <string_view>
#include <utility>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/optim/agreeing_group.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/neighborhood.hpp>
#include <bluefog/topology/neighborhood_of.hpp>

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

/// \return whether the topology is a graph in which somebody has several sources.
template <averaging_topology Topology>
[[nodiscard]] bool has_several_sources(const Topology& topology) {
  if constexpr (topology::graph<Topology>)
    for (int place = 0; place < topology.size(); ++place)
      if (std::ranges::size(topology.in_neighbors(place)) > 1) return true;
  return false;
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

/// With whom each communication of an optimizer averages: a topology, and what takes its place.
template <backend Backend, averaging_topology Topology>
class mixing_schedule {
 public:
  /// A communication: among neighbours or machines, with its links.
  struct communication {
    communication_type type = communication_type::none;
    std::shared_ptr<const neighborhood> links;
  };

  /// \param group  borrowed; must outlive the schedule.
  mixing_schedule(std::string_view optimizer, const agreeing_group<Backend>& group,
                  Topology topology, communication_type type)
      : optimizer_(optimizer), group_(&group), topology_(std::move(topology)), type_(type) {
    expect_fitting(type_);
    several_sources_ = has_several_sources(topology_);
  }

  [[nodiscard]] communication_type type() const noexcept { return type_; }
  void type(communication_type next) {
    expect_fitting(next);
    type_ = next;
  }
  /// \return whether the topology gives somebody several sources: then all ranks send in pieces,
  /// whatever takes its place on some of them.
  [[nodiscard]] bool several_sources() const noexcept { return several_sources_; }
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

  /// \return how many communications have begun.
  [[nodiscard]] mixing_position position() const noexcept { return position_; }
  void position(mixing_position next) noexcept { position_ = next; }
  /// \return the position that the last communication began at.
  [[nodiscard]] mixing_position before() const noexcept { return before_; }

  /// Begins a communication; none if this throws, as what was chosen may be refused.
  [[nodiscard]] communication begin() {
    mixing_position after = position_;
    communication now{type_, nullptr};
    if (type_ != communication_type::none) {
      ++after.communications;
      if (global_every_ > 0 && after.communications % global_every_ == 0)
        now.type = communication_type::allreduce;
    }
    const bool among_neighbors = now.type == communication_type::neighbor_allreduce ||
                                 now.type == communication_type::hierarchical_neighbor_allreduce;
    if (among_neighbors) {
      // The round passes even where the schedule is overridden: other ranks may follow it.
      now.links = std::make_shared<const neighborhood>(next_     ? *next_
                                                       : choose_ ? chosen(after.round)
                                                                 : of_round(after.round));
      ++after.round;
    }
    used_ = among_neighbors ? std::exchange(next_, std::nullopt) : std::nullopt;
    before_ = std::exchange(position_, after);
    return now;
  }
  /// Takes the last communication back: the next one is this one again.
  void recall() noexcept {
    position_ = before_;
    if (!next_) next_ = std::exchange(used_, std::nullopt);
  }

 private:
  [[nodiscard]] const communicator<Backend>& comm() const noexcept { return group_->comm(); }
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
      expects(comm().is_homogeneous(), optimizer_, ": machines differ: ", comm().layout());
      expects(topology_.size() == comm().machine_size(), optimizer_, ": the topology has ",
              topology_.size(), " machines, the communicator has ", comm().machine_size());
    }
  }

  std::string_view optimizer_;
  const agreeing_group<Backend>* group_;
  Topology topology_;
  communication_type type_;
  bool several_sources_ = false;
  int global_every_ = 0;
  std::function<neighborhood(std::int64_t)> choose_;
  std::optional<neighborhood> next_;
  std::optional<neighborhood> used_;  // what was next when the last communication began
  mixing_position position_;
  mixing_position before_;
};

}  // namespace detail
}  // namespace bluefog::optim
