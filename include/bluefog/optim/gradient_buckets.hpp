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
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/optim/gradient_bucket.hpp>
#include <bluefog/optim/known_gradient.hpp>
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
/// all ranks; see `packed`. Behind its gradients a bucket carries one number per parameter: how
/// many ranks used it. The last bucket carries one more, by which a rank can give notice that
/// something is not as usual; it leaves when the others have.
class gradient_buckets {
 public:
  gradient_buckets() = default;

  /// \param parameters  those that learn.
  /// \param order       their indices in the order in which their gradients are expected.
  gradient_buckets(const std::vector<named_tensor>& parameters,
                   const std::vector<std::size_t>& order, const bucket_options& options)
      : options_(options),
        places_(parameters.size()),
        buckets_(packed(parameters, order, options.bytes,
                        [&](at::ScalarType type) { return wire_type(type); })) {
    if (buckets_.empty()) buckets_.emplace_back();  // there may be something to give notice of
    for (std::size_t index = 0; index < buckets_.size(); ++index) {
      bucket& each = buckets_[index];
      const bool last = &each == &buckets_.back();
      const auto flags = static_cast<std::int64_t>(each.members.size() + (last ? 1 : 0));
      each.flat =
          at::zeros({each.count + flags}, at::TensorOptions().dtype(each.type).device(each.device));
      each.missing = each.members.size();
      std::int64_t begin = 0;
      for (std::size_t i = 0; i < each.members.size(); ++i) {
        member& owner = each.members[i];
        places_[owner.index] = {index, i, false};
        owner.slot =
            bluefog::detail::part_of_tensor(each.flat, begin, owner.parameter.sizes(),
                                            bluefog::detail::dense_strides(owner.parameter));
        begin += owner.parameter.numel();
      }
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

  /// Copies the gradient of parameter `index` in, zeros if it has none or `empty` is set, and sends
  /// the buckets that are now complete.
  template <backend Backend>
  void put(std::size_t index, communicator<Backend>& comm, bool empty = false) {
    place& where = places_[index];
    if (where.filled) return;
    bucket& target = buckets_[where.bucket];
    target.order.pass(target.device);
    member& owner = target.members[where.member];
    at::Tensor gradient = empty ? at::Tensor() : dense(owner.parameter.grad(), owner.name);
    at::Tensor slot = owner.slot;
    if (gradient.defined()) {
      bool lies_there = owner.holds(gradient);
      if (lies_there && (spoilt_ || !options_.in_place)) {
        // Accumulated on top of the last result: this rank's sum must survive the reduction.
        gradient = gradient.clone();
        at::Tensor(owner.parameter).mutable_grad() = gradient;
        lies_there = false;
      }
      if (options_.predivide != 1)  // in the gradient's type, which may hold what the slot's cannot
        at::div_out(slot, gradient, at::scalar_tensor(options_.predivide, at::kDouble));
      else if (!lies_there)
        slot.copy_(gradient);
    } else {
      slot.zero_();
    }
    if (gradient.defined()) ++target.used;
    owner.used = gradient.defined();
    if (!options_.in_place) owner.sent = noted_gradient(owner.parameter.grad());
    where.filled = true;
    --target.missing;
    for (; sent_ + 1 < buckets_.size() && buckets_[sent_].missing == 0; ++sent_)
      send(buckets_[sent_], comm);
  }

  /// \return a parameter whose gradient was changed in vain after it was put in; null if none.
  [[nodiscard]] const std::string* changed() const {
    if (spoilt_ || options_.in_place) return nullptr;
    for (const bucket& each : buckets_)
      for (const member& it : each.members)
        if (places_[it.index].filled && it.sent.differs(it.parameter.grad())) return &it.name;
    return nullptr;
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
    const std::exception_ptr failure = await_all();
    clear();
    if (failure) std::rethrow_exception(failure);
    read_flags();
    return last.reduced_flag(last.members.size()) != 0;
  }

  /// Hands the results over: a gradient then lies in its bucket, until it is cleared. A parameter
  /// that no rank used keeps an undefined gradient. \param passes  the result is divided by this.
  /// \return the indices of those that no rank used.
  std::vector<std::size_t> hand_over(double passes) {
    std::vector<std::size_t> unused;
    const double factor = options_.predivide / passes;
    for (bucket& each : buckets_) {
      const auto as_is = [&](const member& it) { return each.type == it.type; };
      const bool all_as_is = std::ranges::all_of(each.members, as_is);
      if (all_as_is && factor != 1) each.flat.narrow(0, 0, each.count).mul_(factor);
      for (std::size_t i = 0; i < each.members.size(); ++i) {
        const member& it = each.members[i];
        if (each.reduced_flag(i) == 0)
          unused.push_back(it.index);
        else
          at::Tensor(it.parameter).mutable_grad() =
              all_as_is ? it.slot : scaled_copy(it.slot, it.type, factor);
      }
    }
    return unused;
  }

  /// Gives up on this rank what is under way. Other ranks may not know and wait for the rest, which
  /// `finish` sends; what that reduces is no good on any rank.
  /// \throws usage_error if gradients are still where results come to lie, once they lie there.
  void spoil() {
    if (sent_ == 0) return clear();  // no rank has anything of it
    spoilt_ = true;
    if (!options_.in_place) return;
    for (const bucket& each : buckets_)
      for (const member& it : each.members) {
        if (!places_[it.index].filled || !it.holds(it.parameter.grad())) continue;
        await_all();
        throw usage_error(
            concat(options_.owner, ": a backward has failed while the gradient of parameter \"",
                   it.name, "\" was reduced in place; before the next one clear gradients with ",
                   "zero_grad(true), which takes them from their place"));
      }
  }
  [[nodiscard]] bool spoilt() const noexcept { return spoilt_; }

 private:
  struct place {
    std::size_t bucket = 0;
    std::size_t member = 0;
    bool filled = false;
  };
  using bucket = gradient_bucket;
  using member = bucket::member;

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
    full.note_use();
    const auto flat = bluefog::detail::only(full.flat);
    const const_buffer outline = bluefog::detail::outlines(flat).front();
    auto call = bluefog::detail::check_allreduce(comm, outline, outline, options_.op, {});
    call.operation = options_.owner;
    bluefog::detail::name_caller_stream(comm, full.device);
    auto started = comm.start(std::move(call), [&](auto context) {
      bluefog::detail::parcel values(context, flat, flat);
      task work = bluefog::detail::allreduce_task(context, values.in(), values.out(), options_.op,
                                                  scope::all);
      return bluefog::detail::carry(context, std::move(work), std::move(values));
    });
    flights_.emplace_back(comm.driver(), std::move(started));
  }

  // Whether to go on as usual, and which gradients are defined, the host has to know: here it waits
  // for what the device has been given, once per device.
  void read_flags() {
    for (bucket& each : buckets_) each.fetch_flags();
    for (const bucket& each : buckets_)
      if (!each.device.is_cpu()) bluefog::detail::current_stream(each.device).synchronize();
  }

  // Waits for all that was sent. Returns the first failure.
  std::exception_ptr await_all() {
    std::exception_ptr failure;
    for (transfer& each : flights_) try {
        each.wait();
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    flights_.clear();
    return failure;
  }
  void clear() {
    sent_ = 0;
    spoilt_ = false;
    for (place& each : places_) each.filled = false;
    for (bucket& each : buckets_) {
      each.missing = each.members.size();
      each.used = 0;
    }
  }

  bucket_options options_;
  std::vector<place> places_;
  std::vector<bucket> buckets_;
  std::size_t sent_ = 0;
  bool spoilt_ = false;
  std::vector<transfer> flights_;
};

}  // namespace bluefog::optim::detail
