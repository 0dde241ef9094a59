// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/check.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/gather.hpp>
#include <bluefog/backend/in_order.hpp>
#include <bluefog/backend/options.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/backend/state.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

/// The user's name for one call, e.g. `{.name = "loss"}`: shown in messages, compared in check
/// mode, and refused while another operation on the communicator has it: from its call until its
/// request has been waited for.
struct call_options {
  std::string_view name = {};
};

/// A group of ranks that exchange data over one backend.
///
/// Owns the backend; the operations on it are free functions, one per header, in `collective/`,
/// `neighbor/` and `tensor/`. Move-only; a moved-from communicator may only be destroyed or
/// assigned to. One thread at a time issues operations; any thread may wait for a request, unless
/// the transport serves one thread only. The graph that a differentiable operation leaves refers to
/// the communicator, which then has to stay where it is until the backward is over.
///
/// Construction, `split`, `duplicate`, `local`, `leaders` and destruction are collective: every
/// rank must do them, in the same order as its operations. Destruction waits for outstanding
/// operations, unless an exception is unwinding the stack. Ranks keep the machine they have in the
/// communicator that theirs was made from.
///
/// Arrays that operations are given lie in host memory; on a `device_backend`, such as
/// `nccl_backend`, they may lie in the device's, in and out of one operation alike. Over MPI an
/// operation that has timed out or was given up may still read its input and write its output:
/// they have to stay until the program ends. (Tensors are kept alive.)
///
/// \tparam Backend  the transport, e.g. `mpi_backend` or `thread_backend`.
template <backend Backend>
class communicator {
 public:
  using backend_type = Backend;

  /// All ranks of the backend's default group.
  explicit communicator(communicator_options options = {})
    requires std::default_initializable<Backend>
      : communicator(Backend(), std::move(options)) {}

  /// The ranks of `transport`, which is taken over.
  explicit communicator(Backend transport, communicator_options options = {})
      : communicator(std::move(transport), std::move(options), nullptr, std::nullopt) {}

  /// The ranks of a native group, e.g. an `MPI_Comm`, which is duplicated, not taken over.
  template <class Native>
    requires(std::constructible_from<Backend, const Native&> &&
             !std::same_as<Native, communicator_options> && !std::same_as<Native, Backend> &&
             !std::same_as<Native, communicator>)
  explicit communicator(const Native& native, communicator_options options = {})
      : communicator(Backend(native), std::move(options)) {}

  /// \return this rank's number, in [0, size()).
  [[nodiscard]] int rank() const noexcept { return state_->transport().rank(); }
  /// \return the number of ranks.
  [[nodiscard]] int size() const noexcept { return state_->transport().size(); }
  /// \return this rank's number among the ranks of its machine.
  [[nodiscard]] int local_rank() const noexcept { return state_->layout().local_rank(); }
  /// \return the number of ranks on this machine.
  [[nodiscard]] int local_size() const { return state_->layout().local_size(); }
  /// \return this machine's number; machines are numbered by their lowest rank.
  [[nodiscard]] int machine_rank() const noexcept { return state_->layout().machine_rank(); }
  /// \return the number of machines.
  [[nodiscard]] int machine_size() const noexcept { return state_->layout().machine_size(); }
  /// \return whether all machines have equally many ranks, numbered machine by machine.
  [[nodiscard]] bool is_homogeneous() const noexcept { return state_->layout().is_homogeneous(); }
  /// \return which ranks share a machine.
  [[nodiscard]] const machine_layout& layout() const noexcept { return state_->layout(); }

  /// \return what this rank has sent so far. Local.
  [[nodiscard]] bluefog::statistics statistics() const noexcept {
    return state_->counters().snapshot();
  }
  /// \return the options in force, those of the environment filled in.
  [[nodiscard]] const communicator_options& options() const noexcept { return state_->options(); }
  /// \return the backend, e.g. for what it offers beyond the concept; stays owned.
  [[nodiscard]] Backend& transport() const noexcept { return state_->transport(); }

  /// Groups ranks by `color`; within a group they are numbered by `key`, then by rank.
  /// \return the communicator of this rank's group.
  [[nodiscard]] communicator split(int color, int key) {
    const auto table = gather_pairs(color, key);
    std::vector<int> members;
    for (int other = 0; other < size(); ++other)
      if (table[index(other)].first == color) members.push_back(other);
    std::ranges::stable_sort(members, {}, [&](int other) { return table[index(other)].second; });
    return of(members);
  }
  /// Groups ranks by `color`, in the order that they have here.
  [[nodiscard]] communicator split(int color) { return split(color, rank()); }

  /// \return a communicator of the same ranks whose operations never mix with those of this one.
  [[nodiscard]] communicator duplicate() { return split(0, rank()); }

  /// \return the ranks of this machine.
  [[nodiscard]] communicator local() { return split(machine_rank(), rank()); }

  /// \return the lowest rank of each machine; empty on the other ranks.
  [[nodiscard]] std::optional<communicator> leaders() {
    auto group = split(local_rank() == 0 ? 0 : 1, rank());
    return local_rank() == 0 ? std::optional<communicator>(std::move(group)) : std::nullopt;
  }

  // For those who write operations:

  /// \return whether check mode is on, and descriptions have to be made.
  [[nodiscard]] bool checks() const noexcept { return options().check && size() > 1; }

  /// Runs an operation to its end. Throws what it fails with.
  /// \param make  from an `operation_context<Backend>` makes the task, whose coroutine owns neither
  ///              requests nor communicators.
  template <std::invocable<operation_context<Backend>> Make>
  void run(call_description call, Make make) {
    auto& next = number_of(call);
    const auto made = job_of(std::move(call), std::move(make), next);
    ++next;
    state_->counters().count_operation();
    driver()->run(made);
  }

  /// Starts an operation. \return what to wait for, to be put into a request with `driver()`.
  template <std::invocable<operation_context<Backend>> Make>
  [[nodiscard]] std::shared_ptr<job> start(call_description call, Make make) {
    auto& next = number_of(call);
    auto made = job_of(std::move(call), std::move(make), next);
    driver()->submit(made);
    ++next;
    state_->counters().count_operation();
    return made;
  }

  /// Collective. \return a communicator of the same ranks with an order of operations of its
  ///         own, which counts into the statistics of this one: for what communicates at its own
  ///         times, e.g. when gradients are ready, between the operations of the program.
  [[nodiscard]] communicator companion() {
    meet();
    std::vector<int> members(index(size()));
    std::iota(members.begin(), members.end(), 0);
    return of(members, state_->shared_counters());
  }

  /// Tells the other ranks that this one takes no part in operations from now on, nor in those
  /// that it knows another rank to be missing from, where the transport carries letters. A rank
  /// that waits for it can then find out by `lacks_rank`.
  void withdraw() { state_->withdraw(); }
  /// The next operation gets a number later. The same on every rank.
  void pass() noexcept { state_->pass(); }
  /// Finds out what other ranks have said, which is also done while an operation waits.
  void listen() {
    if (const auto next = state_->next_number(); next > 0) state_->listen(next - 1);
  }
  /// \return whether a rank is known to take no part in an operation that this rank has begun.
  [[nodiscard]] bool lacks_rank() const noexcept {
    const std::uint64_t next = state_->next_number();
    return next > 0 && state_->lacks_rank(next - 1);
  }
  /// \return whether a rank is known to take no part in the next operation.
  [[nodiscard]] bool will_lack_rank() const noexcept {
    return state_->lacks_rank(state_->next_number());
  }
  /// Gives up all operations of this communicator that are outstanding on this rank.
  void give_up() { driver()->drain(*state_, /*give_up=*/true); }

  /// \return what drives the operations of this communicator and of those derived from it.
  [[nodiscard]] const std::shared_ptr<engine>& driver() const noexcept { return state_->driver(); }

 private:
  // `machine` is this rank's, if the communicator that this one is made from has found it out.
  communicator(Backend transport, communicator_options options, std::shared_ptr<engine> driver,
               std::optional<int> machine, std::shared_ptr<traffic> counters = nullptr) {
    options.validate();
    apply_log_settings(settings::from_environment());
    state_ = std::make_unique<communicator_state<Backend>>(std::move(transport), options,
                                                           std::move(driver), std::move(counters));
    if (!machine)
      machine = options.ranks_per_machine ? rank() / *options.ranks_per_machine
                                          : state_->transport().machine();
    std::vector<int> machines(index(size()));
    for (int other = 0; const auto& pair : gather_pairs(*machine, 0))
      machines[index(other++)] = pair.first;
    state_->layout(machine_layout(machines, rank()));
  }

  [[nodiscard]] static std::size_t index(int rank) noexcept {
    return static_cast<std::size_t>(rank);
  }

  // The number that the next operation like `call` gets.
  [[nodiscard]] std::uint64_t& number_of(const call_description& call) {
    return call.peer ? state_->next_number(*call.peer) : state_->next_number();
  }

  // Makes operation `number`, which nobody has heard of yet. Throws what refuses it.
  template <class Make>
  [[nodiscard]] std::shared_ptr<job> job_of(call_description call, Make make,
                                            std::uint64_t number) {
    const auto kind = call.peer ? channel::pair : channel::group;
    const operation_context<Backend> context(*state_, kind, number);
    operation_label label{call.operation, call.name, {kind, number, 0}};
    task work = make(context);
    if (checks()) {
      std::vector<int> ranks(index(size()));
      std::iota(ranks.begin(), ranks.end(), 0);
      if (call.peer) ranks = {std::min(rank(), *call.peer), std::max(rank(), *call.peer)};
      work = checked(context, std::move(call), std::move(ranks), std::move(work));
    }
    if constexpr (device_backend<Backend>)
      work = in_order(context, context.transport().called(), std::move(work));
    return std::make_shared<job>(std::move(work), std::move(label), *state_);
  }

  // Two numbers from every rank, in rank order.
  [[nodiscard]] std::vector<std::pair<int, int>> gather_pairs(int first, int second) {
    const auto all = std::make_shared<std::vector<std::int32_t>>();
    run({.operation = "communicator"}, [&](auto context) {
      return gather_equal(context, {first, second}, all);
    });
    std::vector<std::pair<int, int>> pairs;
    for (std::size_t i = 0; i < all->size(); i += 2) pairs.emplace_back((*all)[i], (*all)[i + 1]);
    return pairs;
  }

  // Returns when all ranks have come here, or throws a `timeout_error`.
  void meet() { static_cast<void>(gather_pairs(0, 0)); }

  // Once all have met, which the caller sees to, they meet again: where one of them has given up by
  // then, that ends in a time-out on all. Transports may make communicators without one.
  [[nodiscard]] communicator of(const std::vector<int>& members,
                                std::shared_ptr<traffic> counters = nullptr) {
    meet();
    return communicator(state_->transport().subset(members, state_->next_subset()), options(),
                        driver(), machine_rank(), std::move(counters));
  }

  std::unique_ptr<communicator_state<Backend>> state_;
};

}  // namespace bluefog
