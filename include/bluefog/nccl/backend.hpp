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
#include <bluefog/nccl/bootstrap.hpp>
#include <bluefog/nccl/check.hpp>
#include <bluefog/nccl/connection.hpp>
#include <bluefog/nccl/exchange.hpp>
#include <bluefog/nccl/group.hpp>
#include <bluefog/nccl/handle.hpp>
#include <bluefog/nccl/kernels.hpp>
#include <bluefog/nccl/library.hpp>
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
/// NCCL has no tags: ranks have to call all operations of one communicator in the same order, those
/// of pairs among them, and a message for an operation that is over is not noticed except in check
/// mode. Lengths that differ are not noticed by it either. Any thread may call any function. Each
/// communicator has a stream of its own.
class nccl_backend {
 public:
  using operation_type = nccl::operation;
  using stream_type = cudaStream_t;
  static constexpr std::string_view name = "nccl";
  static constexpr memory_space space = memory_space::device;

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
    if (!connection_ || std::uncaught_exceptions() <= exceptions_) return;
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

  // What makes it a `device_backend`:

  [[nodiscard]] bool on_device(const void* data) const { return nccl::library::on_device(data); }

  [[nodiscard]] scratch_pool::block scratch(std::size_t bytes) {
    const auto inside = connection_->enter();
    return connection_->device_memory().acquire(bytes);
  }

  /// \return what the program has given to its stream so far.
  [[nodiscard]] std::shared_ptr<nccl::unique_event> called() {
    const nccl::device_scope scope(device());
    return std::make_shared<nccl::unique_event>(nccl::record(caller_));
  }

  void follow(const std::shared_ptr<nccl::unique_event>& moment) {
    const auto inside = connection_->enter();
    connection_->follow(moment->get());
  }

  [[nodiscard]] nccl::operation finished() {
    const auto inside = connection_->enter();
    return connection_->take_work() ? nccl::operation::all_so_far(connection_) : nccl::operation();
  }

  /// Calls `work()`, which gives something to `stream()`, in order with the communications.
  template <std::invocable Work>
  void give(Work work) {
    const auto inside = connection_->enter();
    connection_->note_work();
    work();
  }

  /// Makes the stream that `caller_stream` names wait for all work so far.
  void caller_follows() {
    const auto inside = connection_->enter();
    const auto moment = last_moment();
    nccl::check(cudaStreamWaitEvent(caller_, moment.get(), 0), "cudaStreamWaitEvent");
  }

  /// Blocks until all work so far is over: for memory that the host shares with the device.
  void synchronize() {
    const auto moment = last_moment();
    const auto over = [&] {
      const auto inside = connection_->enter();
      return nccl::is_over(moment.get());
    };
    while (!over()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

  void mix(mutable_buffer out, double self_weight, const_buffer self,
           std::span<const kernel::weighted_input> inputs) {
    expects(on_device(self.data), "nccl_backend: in and out have to lie in the same memory");
    compute([&](const nccl::kernels& on) { on.mix(stream(), out, self_weight, self, inputs); });
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
  void copy(const_buffer in, mutable_buffer out) {
    give([&] {
      nccl::check(cudaMemcpyAsync(out.data, in.data, in.bytes(), cudaMemcpyDefault, stream()),
                  "cudaMemcpyAsync");
    });
  }

 private:
  nccl_backend(nccl::group group, int rank)
      : group_(std::move(group)), rank_(rank), connection_(nccl::connect(group_, rank)) {}

  [[nodiscard]] nccl::unique_event last_moment() {
    const auto inside = connection_->enter();
    return nccl::record(stream());
  }

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

  nccl::group group_;
  int rank_;
  std::shared_ptr<nccl::connection> connection_;
  cudaStream_t caller_ = nullptr;
  int exceptions_ = std::uncaught_exceptions();
};

static_assert(backend<nccl_backend>);
static_assert(allreducing_backend<nccl_backend>);
static_assert(broadcasting_backend<nccl_backend>);
static_assert(device_backend<nccl_backend>);

}  // namespace bluefog
