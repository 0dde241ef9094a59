// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/transfer.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/dtype.hpp>
#include <bluefog/tensor/part.hpp>

namespace bluefog::optim::detail {

/// Gradients side by side in buckets, each of which is reduced as one message.
///
/// The last parameters come first, since their gradients are ready first, and the first bucket is
/// small, so that something travels early. Buckets are sent in this order whatever order gradients
/// become ready in, so it is the same on all ranks. Behind its gradients a bucket carries one
/// number per parameter: how many ranks used it.
class gradient_buckets {
 public:
  gradient_buckets() = default;

  /// \param parameters  those that learn, in the optimizer's order.
  gradient_buckets(const std::vector<named_tensor>& parameters,
                   const gradient_allreduce_options& options)
      : options_(options), places_(parameters.size()) {
    constexpr std::int64_t first_bucket = 1 << 20;
    std::int64_t limit = std::min(first_bucket, options.bucket_bytes);
    for (std::size_t i = parameters.size(); i-- > 0;) {
      const at::Tensor& parameter = parameters[i].tensor;
      const auto type = wire_type(parameter.scalar_type());
      const std::int64_t bytes =
          parameter.numel() * static_cast<std::int64_t>(c10::elementSize(type));
      const bool fits = !buckets_.empty() && buckets_.back().type == type &&
                        buckets_.back().device == parameter.device() &&
                        buckets_.back().bytes + bytes <= limit;
      if (!fits) {
        if (!buckets_.empty()) limit = options.bucket_bytes;
        buckets_.push_back({.type = type, .device = parameter.device()});
      }
      bucket& last = buckets_.back();
      places_[i] = {buckets_.size() - 1, last.count, last.members.size(), false};
      last.members.push_back({i, parameters[i].name, parameter, parameter.scalar_type()});
      last.count += parameter.numel();
      last.bytes += bytes;
    }
    for (bucket& each : buckets_) {
      const auto flags = static_cast<std::int64_t>(each.members.size());
      each.flat =
          at::zeros({each.count + flags}, at::TensorOptions().dtype(each.type).device(each.device));
      each.missing = each.members.size();
      for (member& owner : each.members)
        owner.slot = part_of_tensor(each.flat, places_[owner.index].begin, owner.parameter.sizes(),
                                    dense_strides(owner.parameter));
    }
  }

  /// \throws usage_error that names a parameter whose dtype, device or shape has changed.
  void expect_unchanged() const {
    for (const bucket& each : buckets_)
      for (const member& it : each.members)
        expects(it.parameter.scalar_type() == it.type && it.parameter.device() == each.device &&
                    it.parameter.sizes() == it.slot.sizes(),
                "gradient_allreduce: parameter \"", it.name, "\" was ", it.type, " ",
                it.slot.sizes(), " on ", each.device, " when it was wrapped and is ",
                it.parameter.scalar_type(), " ", it.parameter.sizes(), " on ",
                it.parameter.device(), " now; wrap the optimizer after converting the model");
  }
  /// \return whether anything has been put in or sent since `collect`.
  [[nodiscard]] bool busy() const noexcept { return busy_; }

  /// Copies the gradient of parameter `index` in, zeros if it has none, and sends the buckets that
  /// are now complete.
  template <backend Backend>
  void put(std::size_t index, communicator<Backend>& comm) {
    place& where = places_[index];
    if (where.filled) return;
    bucket& target = buckets_[where.bucket];
    const member& owner = target.members[where.member];
    at::Tensor gradient = dense(owner.parameter.grad(), owner.name);
    at::Tensor slot = owner.slot;
    if (gradient.defined()) {
      if (slot.data_ptr() == gradient.data_ptr() && slot.numel() != 0) {
        // Accumulated on top of the last result: this rank's sum must survive the reduction.
        gradient = gradient.clone();
        at::Tensor(owner.parameter).mutable_grad() = gradient;
      }
      slot.copy_(gradient);
      if (options_.predivide != 1) slot.div_(options_.predivide);
    } else {
      slot.zero_();
    }
    target.flag(where.member).fill_(gradient.defined() ? 1 : 0);  // summed or averaged along
    where.filled = true;
    busy_ = true;
    --target.missing;
    while (sent_ < buckets_.size() && buckets_[sent_].missing == 0) send(buckets_[sent_++], comm);
  }

  /// Puts in whatever is missing.
  template <backend Backend>
  void put_rest(communicator<Backend>& comm) {
    for (const bucket& each : buckets_)
      for (const member& owner : each.members) put(owner.index, comm);
  }

  /// Waits for the reductions and hands the results over: a gradient then lies in its bucket, until
  /// it is cleared. A parameter that no rank used keeps an undefined gradient. \param passes  the
  /// result is divided by this.
  void collect(double passes) {
    wait();
    const double factor = options_.predivide / passes;
    for (bucket& each : buckets_) {
      if (factor != 1) each.flat.narrow(0, 0, each.count).mul_(factor);
      for (std::size_t i = 0; i < each.members.size(); ++i) {
        at::Tensor parameter = each.members[i].parameter;
        if (each.flag(static_cast<std::int64_t>(i)).template item<float>() == 0) continue;
        const at::Tensor& reduced = each.members[i].slot;
        if (reduced.scalar_type() == parameter.scalar_type())
          parameter.mutable_grad() = reduced;
        else
          parameter.mutable_grad() = reduced.to(parameter.scalar_type());
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
  };
  struct bucket {
    at::ScalarType type = at::ScalarType::Float;
    at::Device device = at::kCPU;
    std::int64_t count = 0;
    std::int64_t bytes = 0;
    std::vector<member> members = {};
    at::Tensor flat = {};
    std::size_t missing = 0;

    [[nodiscard]] at::Tensor flag(std::int64_t index) const {
      return flat.select(0, count + index);
    }
    [[nodiscard]] at::Tensor flag(std::size_t index) const {
      return flag(static_cast<std::int64_t>(index));
    }
  };

  [[nodiscard]] at::ScalarType wire_type(at::ScalarType type) const {
    if (options_.compression == compression::fp16) return at::kHalf;
    if (options_.compression == compression::bf16) return at::kBFloat16;
    return type;
  }

  [[nodiscard]] at::Tensor dense(const at::Tensor& gradient, const std::string& name) const {
    if (!gradient.defined() || !gradient.is_sparse()) return gradient;
    expects(options_.sparse_as_dense, "gradient_allreduce: the gradient of parameter \"", name,
            "\" is sparse; set sparse_as_dense to send it as a dense one");
    return gradient.to_dense();
  }

  template <backend Backend>
  void send(bucket& full, communicator<Backend>& comm) {
    const at::Tensor flat = full.flat;
    const mutable_buffer values{static_cast<std::byte*>(flat.data_ptr()), flat.numel(),
                                dtype_from(flat.scalar_type(), "gradient_allreduce")};
    auto call = bluefog::detail::check_allreduce(comm, values, values, options_.op, {});
    call.operation = "gradient_allreduce";
    auto started = comm.start(std::move(call), [&](auto context) {
      return bluefog::detail::allreduce_task(context, values, values, options_.op, scope::all,
                                             flat);
    });
    flights_.emplace_back(comm.driver(), std::move(started));
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
    for (bucket& each : buckets_) each.missing = each.members.size();
    if (failure) std::rethrow_exception(failure);
  }

  gradient_allreduce_options options_;
  std::vector<place> places_;
  std::vector<bucket> buckets_;
  std::size_t sent_ = 0;
  bool busy_ = false;
  std::vector<transfer> flights_;
};

}  // namespace bluefog::optim::detail
