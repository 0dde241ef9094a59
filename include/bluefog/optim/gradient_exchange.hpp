// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/gather.hpp>
#include <bluefog/collective/broadcast_object.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/logger.hpp>
#include <bluefog/optim/agreement.hpp>
#include <bluefog/optim/contribution.hpp>
#include <bluefog/optim/gradient_buckets.hpp>
#include <bluefog/optim/gradient_watch.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/parameters.hpp>

namespace bluefog::optim::detail {

/// Keeps gradients of all ranks together: which parameters learn and in which order they travel is
/// the same on all ranks at any time.
///
/// That plan changes at the end of a reduction only, by agreement: buckets follow the order in
/// which gradients became ready on rank 0 the first time; and a rank whose parameters are no longer
/// those of the plan (frozen, unfrozen, added) gives notice in the last bucket, upon which all
/// ranks compare their lists, and reduce once more by the new plan.
template <backend Backend>
class gradient_exchange {
 public:
  /// \param comm     from which a companion is made: which bucket is sent when depends on the data,
  ///                 and so would the order among the program's own operations.
  gradient_exchange(communicator<Backend>& comm, const bucket_options& options)
      : options_(options), comm_(comm.companion()) {}

  [[nodiscard]] communicator<Backend>& comm() noexcept { return comm_; }
  [[nodiscard]] const std::vector<named_tensor>& parameters() const noexcept { return parameters_; }
  /// \return whether the listener hears of all parameters.
  [[nodiscard]] bool intact() const { return watch_.intact(); }

  /// Takes over the parameters. Collective. The listener is told their indices in this list.
  /// \throws mismatch_error, on every rank, that names the first difference.
  void adopt(std::vector<named_tensor> parameters, std::weak_ptr<gradient_listener> listener) {
    parameters_ = std::move(parameters);
    listener_ = std::move(listener);
    agree();
    watch();
  }
  /// Appends a parameter, to be agreed on.
  void add(named_tensor parameter) { parameters_.push_back(std::move(parameter)); }

  /// Takes in which parameters learn now, and where their gradients arrive. Local.
  void refresh() {
    buckets_.expect_unchanged();
    const auto now = learning();
    changed_ = now != plan_;
    if (now != watched_ || !watch_.intact()) watch();
  }

  /// The gradient of parameter `index` is complete.
  /// \param sends  whether to send the buckets that are complete now.
  void ready(std::size_t index, bool sends = true) {
    const auto found = std::ranges::lower_bound(plan_, index);
    if (found == plan_.end() || *found != index) return;
    const auto place = static_cast<std::size_t>(found - plan_.begin());
    if (!settled_ && std::ranges::find(seen_, place) == seen_.end()) seen_.push_back(place);
    if (sends && !buckets_.spoilt()) buckets_.put(place, comm_);
  }

  /// Gives up what is under way on this rank: the next reduction is made twice, on all ranks. Where
  /// gradients are reduced in place, and some rank has not given up, it is an error on all.
  void spoil() { buckets_.spoil(); }

  /// Reduces what is not yet reduced and leaves the results in place, divided by the mean number of
  /// passes of the ranks that have any, or by one if `divides` is not set. Collective.
  reduction_result reduce(const contribution& own, bool divides) {
    const c10::AutoGradMode no_grad(false);
    reduction_result result{.passes = static_cast<double>(own.passes),
                            .states_differ = own.states_differ};
    ++round_;
    if (!warned_) warn_of_change();
    for (;;) {
      const bool spoilt = buckets_.spoilt();
      const bool usual = !spoilt && !changed_ && !own.joined && own.passes == own.wanted &&
                         own.objection < 0 && !own.local_steps && !own.states_differ;
      if (!buckets_.finish(!usual, /*empty=*/own.passes == 0, comm_)) break;
      const auto all = gather(own, spoilt);
      const bool changed = std::ranges::any_of(all, &record::changed);
      if (changed) agree();
      if (reduced_in_vain(all) || changed) continue;
      result = summary(all);
      break;
    }
    if (!result.local_steps)
      say_unused(buckets_.hand_over(divides ? std::max(result.passes, 1.0) : 1.0));
    follow_root();
    return result;
  }

  /// Averages the parameters themselves. Collective.
  void average_parameters() {
    const c10::AutoGradMode no_grad(false);
    for (;;) {
      std::vector<at::Tensor> values;
      for (const std::size_t index : plan_) values.push_back(parameters_[index].tensor.detach());
      at::TensorOptions kind(at::kFloat);
      if (!values.empty()) kind = values.front().options().requires_grad(false);
      const at::Tensor notice = at::full({1}, changed_ ? 1 : 0, kind);
      values.push_back(notice);
      allreduce_(comm_, std::span<const at::Tensor>(values));
      if (notice.item<float>() == 0) return;
      agree();
    }
  }

  /// Overwrites the parameters with those of `root`. Collective.
  void broadcast_from(int root) {
    std::vector<at::Tensor> values;
    for (const auto& each : parameters_) values.push_back(each.tensor.detach());
    broadcast_parameters(comm_, std::span<const at::Tensor>(values), root);
  }

  /// Counts reductions from now on: which rank joins last is found out anew.
  void forget_joined() { joined_in_ = 0; }

 private:
  using record = reduction_record;

  [[nodiscard]] std::vector<record> gather(const contribution& own, bool spoilt) {
    if (own.joined && joined_in_ == 0) joined_in_ = round_;
    const record own_record{
        spoilt,        changed_,        own.passes,       own.joined ? joined_in_ : record::never,
        own.objection, own.local_steps, own.states_differ};
    using numbers = std::array<std::int64_t, sizeof(record) / sizeof(std::int64_t)>;
    const auto sent = std::bit_cast<numbers>(own_record);
    std::vector<record> records(static_cast<std::size_t>(comm_.size()));
    const auto all = std::make_shared<std::vector<std::int64_t>>();
    comm_.run({.operation = options_.owner}, [&](auto context) {
      return gather_equal(context, std::vector(sent.begin(), sent.end()), all);
    });
    std::memcpy(records.data(), all->data(), all->size() * sizeof(std::int64_t));
    return records;
  }

  void warn_of_change() {
    const std::string* const changed = buckets_.changed();
    if (changed == nullptr) return;
    warned_ = true;
    logger::write(
        log_level::warning,
        concat(options_.owner, ": the gradient of \"", *changed, "\" was changed after it ",
               "was sent, which has no effect; change gradients after synchronize()"));
  }

  // In debugging, whenever they are others. \param places  in the plan.
  void say_unused(std::vector<std::size_t> places) {
    std::ranges::sort(places);
    if (places == unused_) return;
    unused_ = std::move(places);
    if (unused_.empty() || !logger::says(log_level::debug)) return;
    std::string names;
    for (const std::size_t place : unused_)
      names += concat(names.empty() ? "\"" : ", \"", parameters_[plan_[place]].name, "\"");
    logger::write(log_level::debug, concat(options_.owner, ": no rank uses ", names));
  }

  // Whether to reduce once more, because of what some rank has sent.
  [[nodiscard]] bool reduced_in_vain(const std::vector<record>& all) const {
    const auto found = std::ranges::find(all, 1, &record::spoilt);
    if (found == all.end()) return false;
    // In place: ranks that have not given up have lost their gradients.
    expects(!options_.in_place || std::ranges::all_of(all, &record::spoilt), options_.owner,
            ": rank ", found - all.begin(),
            " has given up a backward that other ranks have finished; clear the gradients of all "
            "ranks and make it anew");
    return true;
  }

  [[nodiscard]] std::vector<std::size_t> learning() const {
    std::vector<std::size_t> indices;
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (parameters_[i].tensor.requires_grad()) indices.push_back(i);
    return indices;
  }

  // Makes the parameters as they are now the plan of all ranks. Collective.
  void agree() {
    expect_equal_parameters(options_.owner, comm_, named_list{parameters_});
    expect_travelling(options_.owner, named_list{parameters_}, /*frozen_too=*/false);
    plan_ = learning();
    changed_ = false;
    settled_ = false;
    without_order_ = 0;
    seen_.clear();
    unused_.clear();
    pack({});
  }

  // Makes the order of rank 0's first backward that of all ranks, unless it goes on having none, as
  // where gradients are set by hand. Collective.
  void follow_root() {
    constexpr int patience = 4;
    if (settled_) return;
    if (buckets_.size() > 1) {
      const std::vector<std::int64_t> own(seen_.begin(), seen_.end());
      const auto order = broadcast_object(comm_, own, 0);
      seen_.clear();
      if (order.empty() && ++without_order_ < patience) return;
      if (!order.empty()) pack({order.begin(), order.end()});
    }
    settled_ = true;
  }

  // Parameters that `order` lacks come last, the later ones first.
  void pack(std::vector<std::size_t> order) {
    std::vector<named_tensor> learns;
    for (const std::size_t index : plan_) learns.push_back(parameters_[index]);
    std::vector<bool> listed(plan_.size());
    for (const std::size_t each : order) listed[each] = true;
    for (std::size_t i = plan_.size(); i-- > 0;)
      if (!listed[i]) order.push_back(i);
    buckets_ = gradient_buckets(learns, order, options_);
  }

  void watch() {
    watched_ = learning();
    watch_ = gradient_watch(listener_);
    for (const std::size_t index : watched_) watch_.add(parameters_[index].tensor, index);
  }

  bucket_options options_;
  communicator<Backend> comm_;
  std::vector<named_tensor> parameters_;
  std::weak_ptr<gradient_listener> listener_;
  std::vector<std::size_t> plan_;     // which parameters travel: the same on all ranks
  std::vector<std::size_t> watched_;  // which parameters learn on this rank
  std::vector<std::size_t> seen_;     // places in the plan, as gradients became ready
  std::vector<std::size_t> unused_;   // places whose parameters no rank has used last
  bool changed_ = false;              // the plan is not what learns on this rank
  bool settled_ = false;              // the buckets follow rank 0, or nobody
  int without_order_ = 0;             // reductions after which rank 0 had none
  bool warned_ = false;               // of a gradient that was changed too late
  std::int64_t round_ = 0;
  std::int64_t joined_in_ = 0;
  gradient_buckets buckets_;
  gradient_watch watch_;
};

}  // namespace bluefog::optim::detail
