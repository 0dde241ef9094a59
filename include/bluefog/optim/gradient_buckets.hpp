// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/scaled_copy.hpp>
#include <bluefog/optim/transfer.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/arguments.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/device.hpp>
#include <bluefog/tensor/parcel.hpp>
#include <bluefog/tensor/part.hpp>

namespace bluefog::optim::detail {

/// How gradients are packed and reduced.
struct bucket_options {
  std::string_view owner;  ///< whose gradients, for messages; static storage
  optim::compression compression = optim::compression::none;
  reduce_op op = reduce_op::average;
  double predivide = 1;
  std::int64_t bytes = 25 << 20;
  bool sparse_as_dense = false;
  bool in_place = false;  ///< gradients that lie in their bucket are reduced there, without a copy
};

/// Gradients side by side in buckets, each of which is reduced as one message.
///
/// Buckets are sent in their order whatever order gradients become ready in, so it is the same on
/// all ranks; the first is small, so that something travels early. Behind its gradients a bucket
/// carries one number per parameter: how many ranks used it. The last bucket carries one more, by
/// which a rank can give notice that something is not as usual; it leaves when the others have.
class gradient_buckets {
 public:
  gradient_buckets() = default;

  /// \param parameters  those that learn.
  /// \param order       their indices in the order in which their gradients are expected.
  gradient_buckets(const std::vector<named_tensor>& parameters,
                   const std::vector<std::size_t>& order, const bucket_options& options)
      : options_(options), places_(parameters.size()) {
    constexpr std::int64_t first_bucket = 1 << 20;
    std::int64_t limit = std::min(first_bucket, options.bytes);
    for (const std::size_t i : order) {
      const at::Tensor& parameter = parameters[i].tensor;
      const auto type = wire_type(parameter.scalar_type());
      const std::int64_t bytes =
          parameter.numel() * static_cast<std::int64_t>(c10::elementSize(type));
      const bool fits = !buckets_.empty() && buckets_.back().type == type &&
                        buckets_.back().device == parameter.device() &&
                        buckets_.back().bytes + bytes <= limit;
      if (!fits) {
        if (!buckets_.empty()) limit = options.bytes;
        buckets_.push_back({.type = type, .device = parameter.device()});
      }
      bucket& last = buckets_.back();
      places_[i] = {buckets_.size() - 1, last.count, last.members.size(), false};
      last.members.push_back({i, parameters[i].name, parameter, parameter.scalar_type()});
      last.count += parameter.numel();
      last.bytes += bytes;
    }
    if (buckets_.empty()) buckets_.emplace_back();  // there may be something to give notice of
    for (bucket& each : buckets_) {
      const bool last = &each == &buckets_.back();
      const auto flags = static_cast<std::int64_t>(each.members.size() + (last ? 1 : 0));
      each.flat =
          at::zeros({each.count + flags}, at::TensorOptions().dtype(each.type).device(each.device));
      each.missing = each.members.size();
      for (member& owner : each.members)
        owner.slot = part_of_tensor(each.flat, places_[owner.index].begin, owner.parameter.sizes(),
                                    dense_strides(owner.parameter));
    }
  }

  [[nodiscard]] std::size_t size() const noexcept { return buckets_.size(); }

  /// \throws usage_error that names a parameter whose dtype, device or shape has changed.
  void expect_unchanged() const {
    for (const bucket& each : buckets_)
      for (const member& it : each.members)
        expects(it.parameter.scalar_type() == it.type && it.parameter.device() == each.device &&
                    it.parameter.sizes() == it.slot.sizes(),
                options_.owner, ": parameter \"", it.name, "\" was ", it.type, " ", it.slot.sizes(),
                " on ", each.device, " when it was wrapped and is ", it.parameter.scalar_type(),
                " ", it.parameter.sizes(), " on ", it.parameter.device(),
                " now; wrap the optimizer after converting the model");
  }
  /// \return whether anything has been put in or sent since the last `finish`.
  [[nodiscard]] bool busy() const noexcept { return busy_; }

  /// Copies the gradient of parameter `index` in, zeros if it has none or `empty` is set, and sends
  /// the buckets that are now complete.
  template <backend Backend>
  void put(std::size_t index, communicator<Backend>& comm, bool empty = false) {
    place& where = places_[index];
    if (where.filled) return;
    bucket& target = buckets_[where.bucket];
    target.order.pass(target.device);
    const member& owner = target.members[where.member];
    at::Tensor gradient = empty ? at::Tensor() : dense(owner.parameter.grad(), owner.name);
    at::Tensor slot = owner.slot;
    if (gradient.defined()) {
      const bool lies_there = slot.data_ptr() == gradient.data_ptr() && slot.numel() != 0;
      if (lies_there && !options_.in_place) {
        // Accumulated on top of the last result: this rank's sum must survive the reduction.
        gradient = gradient.clone();
        at::Tensor(owner.parameter).mutable_grad() = gradient;
      }
      if (options_.predivide != 1)  // in the gradient's type, which may hold what the slot's cannot
        at::div_out(slot, gradient, at::scalar_tensor(options_.predivide, at::kDouble));
      else if (!lies_there || !options_.in_place)
        slot.copy_(gradient);
    } else {
      slot.zero_();
    }
    if (gradient.defined()) ++target.used;
    target.members[where.member].used = gradient.defined();
    where.filled = true;
    busy_ = true;
    --target.missing;
    while (sent_ + 1 < buckets_.size() && buckets_[sent_].missing == 0)
      send(buckets_[sent_++], comm);
  }

  /// Puts in whatever is missing and waits until everything is reduced. Collective.
  /// \param notice  whether something is not as usual on this rank. \param empty  as in `put`.
  /// \return whether some rank has given notice.
  template <backend Backend>
  bool finish(bool notice, bool empty, communicator<Backend>& comm) {
    for (const bucket& each : buckets_)
      for (const member& owner : each.members) put(owner.index, comm, empty);
    bucket& last = buckets_.back();
    last.order.pass(last.device);
    last.flag(last.members.size()).fill_(notice ? 1 : 0);
    send(last, comm);
    wait();
    read_flags();
    return last.reduced_flag(last.members.size()) != 0;
  }

  /// Hands the results over: a gradient then lies in its bucket, until it is cleared. A parameter
  /// that no rank used keeps an undefined gradient. \param passes  the result is divided by this.
  void hand_over(double passes) {
    const double factor = options_.predivide / passes;
    for (bucket& each : buckets_) {
      const auto as_is = [&](const member& it) { return each.type == it.type; };
      const bool all_as_is = std::ranges::all_of(each.members, as_is);
      if (all_as_is && factor != 1) each.flat.narrow(0, 0, each.count).mul_(factor);
      for (std::size_t i = 0; i < each.members.size(); ++i) {
        if (each.reduced_flag(i) == 0) continue;
        const member& it = each.members[i];
        at::Tensor(it.parameter).mutable_grad() =
            all_as_is ? it.slot : scaled_copy(it.slot, it.type, factor);
      }
    }
  }

  /// Waits for what is under way and forgets it.
  void discard() {
    try {
      wait();
    } catch (const error&) {  // the values were not wanted
    }
  }

 private:
  struct place {
    std::size_t bucket = 0;
    std::int64_t begin = 0;
    std::size_t member = 0;
    bool filled = false;
  };
  struct member {
    std::size_t index;
    std::string name;
    at::Tensor parameter;
    at::ScalarType type;
    at::Tensor slot = {};  // over its part of the bucket, shaped and laid out like the parameter
    bool used = false;     // by this rank's backward
  };
  struct bucket {
    at::ScalarType type = at::ScalarType::Float;
    at::Device device = at::kCPU;
    std::int64_t count = 0;
    std::int64_t bytes = 0;
    std::vector<member> members = {};
    at::Tensor flat = {};
    std::size_t missing = 0;
    std::size_t used = 0;
    at::Tensor flags = {};              // what `flat` ends with, reduced, on the host
    bluefog::detail::relay order = {};  // gradients may become ready on several streams

    [[nodiscard]] at::Tensor flag(std::size_t index) const {
      return flat.select(0, count + static_cast<std::int64_t>(index));
    }
    [[nodiscard]] float reduced_flag(std::size_t index) const {
      return flags.const_data_ptr<float>()[index];
    }
  };

  [[nodiscard]] at::ScalarType wire_type(at::ScalarType type) const {
    if (options_.compression == compression::fp16) return at::kHalf;
    if (options_.compression == compression::bf16) return at::kBFloat16;
    return type;
  }

  [[nodiscard]] at::Tensor dense(const at::Tensor& gradient, const std::string& name) const {
    if (!gradient.defined() || !gradient.is_sparse()) return gradient;
    expects(options_.sparse_as_dense, options_.owner, ": the gradient of parameter \"", name,
            "\" is sparse; set sparse_as_dense to send it as a dense one");
    return gradient.to_dense();
  }

  template <backend Backend>
  void send(bucket& full, communicator<Backend>& comm) {
    note_use(full);
    const auto flat = bluefog::detail::only(full.flat);
    const const_buffer outline = bluefog::detail::outlines(flat).front();
    auto call = bluefog::detail::check_allreduce(comm, outline, outline, options_.op, {});
    call.operation = options_.owner;
    bluefog::detail::name_caller_stream(comm, full.device);
    auto started = comm.start(std::move(call), [&](auto context) {
      bluefog::detail::parcel values(context, flat, flat);
      task work = bluefog::detail::allreduce_task(context, values.in(), values.out(), options_.op,
                                                  scope::all, nullptr);
      return bluefog::detail::carry(context, std::move(work), std::move(values));
    });
    flights_.emplace_back(comm.driver(), std::move(started));
  }

  // Writes who of the members was used, which is summed or averaged along: mostly all of them.
  static void note_use(bucket& full) {
    const auto all = static_cast<std::int64_t>(full.members.size());
    full.flat.narrow(0, full.count, all).fill_(1);
    if (full.used == full.members.size()) return;
    for (std::size_t i = 0; i < full.members.size(); ++i)
      if (!full.members[i].used) full.flag(i).zero_();
  }

  // Whether to go on as usual, and which gradients are defined, the host has to know: here it waits
  // for what the device has been given, once per device.
  void read_flags() {
    for (bucket& each : buckets_) {
      each.flags = each.flat.slice(0, each.count).to(at::kFloat);
      if (each.device.is_cpu()) continue;
      const auto pinned = at::TensorOptions(at::kFloat).pinned_memory(true);
      each.flags = at::empty(each.flags.sizes(), pinned).copy_(each.flags, /*non_blocking=*/true);
    }
    for (const bucket& each : buckets_)
      if (!each.device.is_cpu()) bluefog::detail::current_stream(each.device).synchronize();
  }

  void wait() {
    std::exception_ptr failure;
    for (transfer& each : flights_) try {
        each.wait();
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    flights_.clear();
    sent_ = 0;
    busy_ = false;
    for (place& each : places_) each.filled = false;
    for (bucket& each : buckets_) {
      each.missing = each.members.size();
      each.used = 0;
    }
    if (failure) std::rethrow_exception(failure);
  }

  bucket_options options_;
  std::vector<place> places_;
  std::vector<bucket> buckets_;
  std::size_t sent_ = 0;
  bool busy_ = false;
  std::vector<transfer> flights_;
};

}  // namespace bluefog::optim::detail
