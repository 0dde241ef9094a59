// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/unwinding.hpp>
#include <bluefog/nccl/bootstrap.hpp>
#include <bluefog/nccl/check.hpp>
#include <bluefog/nccl/connection.hpp>
#include <bluefog/nccl/exchange.hpp>
#include <bluefog/nccl/group.hpp>
#include <bluefog/nccl/handle.hpp>
#include <bluefog/nccl/kernels.hpp>
#include <bluefog/nccl/native.hpp>
#include <bluefog/nccl/operation.hpp>
#include <bluefog/nccl/staging.hpp>

namespace bluefog {

/// Ranks with a CUDA device each, connected by NCCL.
///
/// Buffers may lie in device memory or in host memory; `in` and `out` of one operation in the same.
/// Host memory is staged: it travels by way of pinned memory and the device. Device memory is used
/// after everything that the program had given to its stream, see `caller_stream`, before it called
/// the operation; when the operation is over, so is all work on that memory.
///
/// NCCL has no tags and no lengths. Three rules follow, which the other backends do not need; check
/// mode verifies the latter two:
/// - Ranks call all operations of one communicator in the same order, those of pairs among them;
///   otherwise they wait for each other until their time is over.
/// - Every message has its receive in the same operation. One that nobody expects is taken for that
///   of a later operation.
/// - A message has the length that its receiver expects. Another one is not noticed: it does not
///   arrive, or damages memory.
///
/// Nor does NCCL tell ranks that wait that another one has given up: they hear of that, and of who
/// is missing, from the board through which the ranks met, as long as rank 0 keeps it. Whatever
/// fails on one rank ends this communicator on all ranks, with one abort each; those split from it
/// or duplicated live on. Afterwards every operation is refused for that reason.
///
/// Any thread may call any function; for its current device see `nccl::device_scope`. Each
/// communicator has a stream of its own, and nothing orders the work of several on one device:
/// where ranks start it in different orders, and the device has no room for both, they wait for
/// each other until their time is over. A program that cannot rule that out waits for what is in
/// flight on one communicator before it uses the next; a blocking call is over on the device, too.
/// `NCCL_LAUNCH_ORDER_IMPLICIT=1` (NCCL 2.26 or newer) has NCCL keep the order in which it is
/// called, which is the same on all ranks for blocking calls of one thread, but not for requests
/// that several communicators have in flight.
class nccl_backend {
 public:
  using operation_type = nccl::operation;
  using stream_type = cudaStream_t;
  static constexpr std::string_view name = "nccl";
  static constexpr memory_space space = memory_space::device;

 private:
  // Calls `act`, which no other rank takes part in: if it throws, the others have to be told, or
  // they would wait for what this rank does not send any more.
  template <class Act>
  decltype(auto) attempt(Act act) {
    const auto inside = connection_->enter();
    try {
      return act();
    } catch (const std::exception& problem) {
      connection_->abort(problem.what());
      throw;
    }
  }

 public:
  /// The ranks of a launcher that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, such
  /// as torchrun. Collective.
  /// \throws usage_error that names the variable which is missing.
  nccl_backend() : nccl_backend(nccl::meet_by_environment()) {}

  /// The ranks that meet. Collective. Each uses device `LOCAL_RANK`, if that is set, else the one
  /// with the rank's number among the ranks of its host.
  /// \throws usage_error if there is no such device, two ranks have the same one, or NCCL
  ///         is another than the program was compiled for; timeout_error if a rank does not come.
  explicit nccl_backend(const nccl::meeting& meeting)
      : nccl_backend(nccl::make_group(meeting), meeting.rank) {}

  nccl_backend(nccl_backend&&) noexcept = default;
  nccl_backend& operator=(nccl_backend&&) noexcept = default;
  nccl_backend(const nccl_backend&) = delete;
  nccl_backend& operator=(const nccl_backend&) = delete;
  /// Ends what is on its way where an exception unwinds the stack: the other ranks may never
  /// answer.
  ~nccl_backend() {
    if (!connection_ || !unwinding_.now()) return;
    try {
      const auto inside = connection_->enter();
      connection_->abort("an exception ended the communicator");
    } catch (...) {  // the device is gone
    }
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(group_.machines.size()); }
  [[nodiscard]] int machine() const noexcept {
    return group_.machines[static_cast<std::size_t>(rank_)];
  }
  [[nodiscard]] bool any_thread() const noexcept { return true; }

  /// \return the number of this rank's device.
  [[nodiscard]] int device() const noexcept { return group_.device; }
  /// \return the stream that this communicator's work is given to.
  [[nodiscard]] cudaStream_t stream() const noexcept { return connection_->stream(); }
  /// Names the stream on which the program makes what it communicates; at first the default stream.
  /// Operations on tensors name libtorch's current stream by themselves.
  void caller_stream(cudaStream_t stream) noexcept { caller_ = stream; }

  /// \param for_host  whether the host reads the messages as soon as the operation is complete.
  [[nodiscard]] nccl::exchange exchange(message_tag, bool for_host = false) {
    using end = nccl::operation::end;
    return {connection_, for_host ? end::over : end::launched};
  }

  [[nodiscard]] bool reduces(reduce_op op, dtype type) const noexcept {
    return nccl::native(op, type).has_value();
  }

  [[nodiscard]] nccl::operation allreduce(const_buffer in, mutable_buffer out, reduce_op op) {
    nccl::staging host;
    const bool direct = on_device(out.data);
    const auto from = direct ? 0 : host.outgoing(in);
    const auto to = direct ? 0 : host.incoming(out);
    return start(std::move(host), [&](nccl::staging& staged) {
      expects_same_memory(in, out);
      nccl::check(
          ncclAllReduce(direct ? in.data : staged.at(from), direct ? out.data : staged.at(to),
                        static_cast<std::size_t>(in.count), *nccl::native(in.type),
                        *nccl::native(op, in.type), connection_->group(), stream()),
          "ncclAllReduce", connection_->group());
    });
  }

  [[nodiscard]] nccl::operation broadcast(mutable_buffer values, int root) {
    nccl::staging host;
    const bool direct = on_device(values.data);
    const auto place = direct ? 0 : rank_ == root ? host.outgoing(values) : host.incoming(values);
    return start(std::move(host), [&](nccl::staging& staged) {
      std::byte* memory = direct ? values.data : staged.at(place);
      nccl::check(ncclBroadcast(memory, memory, values.bytes(), ncclUint8, root,
                                connection_->group(), stream()),
                  "ncclBroadcast", connection_->group());
    });
  }

  [[nodiscard]] nccl_backend subset(std::span<const int> members, std::uint64_t serial) {
    auto [group, own] = nccl::make_subgroup(group_, rank_, members, serial);
    nccl_backend derived(std::move(group), own);
    derived.caller_ = caller_;
    return derived;
  }

  // What makes it a `letter_backend`, by way of the board, which all ranks read:

  void post(int, std::uint64_t number) noexcept { connection_->letters().post(number); }
  [[nodiscard]] std::optional<letter> collect() noexcept {
    return connection_->letters().collect();
  }

  // What makes it a `device_backend`:

  [[nodiscard]] bool on_device(const void* data) const { return connection_->on_device(data); }

  [[nodiscard]] scratch_pool::block scratch(std::size_t bytes) {
    return attempt([&] {
      connection_->expects_usable();  // or the device may be stuck, and give nothing any more
      return connection_->device_memory().acquire(bytes);
    });
  }

  /// \return what the program has given to its stream so far.
  [[nodiscard]] std::shared_ptr<nccl::unique_event> called() {
    return attempt([&] { return std::make_shared<nccl::unique_event>(nccl::record(caller_)); });
  }

  void follow(const std::shared_ptr<nccl::unique_event>& moment) {
    attempt([&] { connection_->follow(moment->get()); });
  }

  [[nodiscard]] nccl::operation finished() {
    return attempt([&] {
      auto work = connection_->take_work();
      return work ? nccl::operation::all_so_far(connection_, *std::move(work)) : nccl::operation();
    });
  }

  /// Calls `work()`, which gives something to `stream()`, in order with the communications, and
  /// calls nothing of this class.
  template <std::invocable Work>
  void give(Work work) {
    attempt([&] {
      work();
      connection_->note_work();
    });
  }

  /// Blocks until all work so far is over: for memory that the host shares with the device.
  /// \throws timeout_error once the time is over in which ranks have to come; peer_error if another
  ///         rank has ended the communicator; transport_error.
  void synchronize() {
    const auto deadline = group_.deadline();
    const auto moment = attempt([&] { return nccl::record(stream()); });
    const auto over = [&] {
      return attempt([&] {
        connection_->expects_usable();
        if (nccl::is_over(moment.get())) return true;
        static_cast<void>(connection_->has_launched());
        connection_->expects_everybody();
        expects<timeout_error>(std::chrono::steady_clock::now() < deadline, "nccl_backend: rank ",
                               rank_, " waits in vain for the work on its device");
        return false;
      });
    };
    while (!over()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

  /// \param for_caller  whether it is done on the stream that `caller_stream` names.
  void mix(mutable_buffer out, double self_weight, const_buffer self,
           std::span<const kernel::weighted_input> inputs, bool for_caller = false) {
    compute([&](const nccl::kernels& on) {
      expects_same_memory(self, out);
      on.mix(for_caller ? caller_ : stream(), out, self_weight, self, inputs);
    });
  }
  void reduce(reduce_op op, mutable_buffer out, std::span<const const_buffer> inputs) {
    compute([&](const nccl::kernels& on) { on.reduce(stream(), op, out, inputs); });
  }
  void convert(mutable_buffer out, const_buffer in) {
    compute([&](const nccl::kernels& on) { on.convert(stream(), out, in); });
  }
  void divide(mutable_buffer values, int divisor) {
    compute([&](const nccl::kernels& on) { on.divide(stream(), values, divisor); });
  }
  void copy(const_buffer in, mutable_buffer out, bool for_caller = false) {
    give([&] {
      nccl::check(cudaMemcpyAsync(out.data, in.data, in.bytes(), cudaMemcpyDefault,
                                  for_caller ? caller_ : stream()),
                  "cudaMemcpyAsync");
    });
  }

 private:
  nccl_backend(nccl::group group, int rank)
      : group_(std::move(group)), rank_(rank), connection_(nccl::connect(group_, rank)) {}

  template <class Begin>
  [[nodiscard]] nccl::operation start(nccl::staging host, Begin begin) {
    nccl::operation started(connection_, nccl::operation::end::launched);
    started.start(std::move(host), begin);
    return started;
  }

  template <class Compute>
  void compute(Compute begin) {
    give([&] { begin(nccl::kernels::of(device())); });
  }

  void expects_same_memory(const_buffer in, const_buffer out) const {
    expects(in.data == out.data || in.count == 0 || on_device(in.data) == on_device(out.data),
            "nccl_backend: in and out have to lie in the same memory");
  }

  nccl::group group_;
  int rank_;
  std::shared_ptr<nccl::connection> connection_;
  cudaStream_t caller_ = nullptr;
  detail::unwinding unwinding_;
};

static_assert(backend<nccl_backend>);
static_assert(allreducing_backend<nccl_backend>);
static_assert(broadcasting_backend<nccl_backend>);
static_assert(device_backend<nccl_backend>);
static_assert(letter_backend<nccl_backend>);

}  // namespace bluefog
