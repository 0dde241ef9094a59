// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/optim/agreeing_group.hpp>
#include <bluefog/optim/agreement.hpp>
#include <bluefog/optim/backward_log.hpp>
#include <bluefog/optim/communicates_over.hpp>
#include <bluefog/optim/communicating_optimizer.hpp>
#include <bluefog/optim/flat_parameters.hpp>
#include <bluefog/optim/mixer.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/optim/partial_step.hpp>
#include <bluefog/optim/saved_numbers.hpp>
#include <bluefog/optim/transfer.hpp>
#include <bluefog/tensor/arguments.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/device.hpp>
#include <bluefog/tensor/parcel.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog::optim {

/// torch's SGD, or what derives from it. Its step is linear in the gradient, which methods need
/// that correct steps rather than gradients.
template <class T>
concept plain_descent = steppable<T> && std::derived_from<T, torch::optim::SGD>;

namespace detail {

/// Whether a method remembers a vector from step to step.
enum class memory : std::uint8_t { none, correction };

/// What the methods without bias, or with their own momentum, share: they communicate in every
/// step. Is the user's optimizer. Parameters may be added, frozen and unfrozen on all ranks alike;
/// where ranks differ in that, a step is a mismatch_error on every rank, as in
/// `adapt_with_combine`. After a step that has failed otherwise ranks may have taken different
/// numbers of steps: the next one is a usage_error, and the wrapper has to be made anew.
template <steppable Inner, backend Backend, averaging_topology Topology>
class exact_method : public Inner, public communicates_over<Backend> {
 public:
  /// Calls the model's forward and returns what it returns, as the other wrappers do.
  template <module_like Model, class... Inputs>
  decltype(auto) forward(Model& model, Inputs&&... inputs) {
    return call_forward(model, std::forward<Inputs>(inputs)...);
  }

  /// \return how many steps have been taken: the schedule's next round.
  [[nodiscard]] std::int64_t round() const noexcept { return round_; }

  /// A step that is left out is left out by all ranks, so the method stands where it was.
  void skip_step() override { log_.stepped(); }
  step_kind settle_gradients() override { return step_kind::mixing; }
  /// What a method corrects with sums over all ranks, so they must not step apart.
  [[nodiscard]] bool reduces_gradients() const noexcept override { return true; }
  [[nodiscard]] std::weak_ptr<const void> identity() const noexcept override { return group_; }
  /// The method begins anew.
  void state_replaced() override {
    const c10::AutoGradMode no_grad(false);
    for (const at::Tensor& each : flat_.kept()) each.zero_();
  }

  /// Writes what the user's optimizer writes, the round, and what the method remembers.
  void save(torch::serialize::OutputArchive& archive) const override {
    Inner::save(archive);
    write_number(archive, "bluefog_round", round_);
    for (std::size_t block = 0; block < flat_.kept().size(); ++block)
      archive.write(key(block), flat_.kept()[block], /*is_buffer=*/true);
  }
  /// An archive of the user's optimizer alone is fine too: the method then begins anew.
  /// \throws usage_error if the archive is that of other parameters; nothing has changed then.
  void load(torch::serialize::InputArchive& archive) override {
    const c10::AutoGradMode no_grad(false);
    refresh();
    const flat_tensors& kept = flat_.kept();
    flat_tensors saved;
    for (at::Tensor next; archive.try_read(key(saved.size()), next, /*is_buffer=*/true);)
      saved.push_back(std::exchange(next, at::Tensor()));
    expects(saved.empty() || kept.empty() || lengths(saved) == lengths(kept), method_,
            ": the archive has ", at::IntArrayRef(lengths(saved)),
            " numbers of state where the parameters need ", at::IntArrayRef(lengths(kept)));
    Inner::load(archive);
    round_ = read_number(archive, "bluefog_round");
    for (std::size_t block = 0; block < kept.size(); ++block)
      saved.empty() ? kept[block].zero_() : kept[block].copy_(saved[block]);
  }

 protected:
  /// \param method  the wrapper's name; static storage.
  template <module_like Model>
  exact_method(std::string_view method, Inner&& inner, const Model& model,
               communicator<Backend>& comm, Topology topology, memory remembers)
      : Inner(std::move(inner)),
        method_(method),
        group_(std::make_shared<agreeing_group<Backend>>(method, comm)),
        topology_(std::move(topology)) {
    refuse_line_search<Inner>();
    expects(topology_.size() == comm.size(), method_, ": the topology has ", topology_.size(),
            " ranks, the communicator has ", comm.size());
    flat_ = flat_parameters(this->param_groups(), module_of(model));
    if (remembers == memory::correction) flat_.keep();
    log_.follow(flat_.arena(), /*anew=*/true);
    group_->adopt(flat_.arena());
    expect_travelling(method_, flat_.arena(), /*frozen_too=*/false);
  }

  [[nodiscard]] const flat_parameters& flat() const noexcept { return flat_; }

  /// What every step begins with: runs the closure, once, with gradients recorded.
  at::Tensor begin_step(const typename Inner::LossClosure& closure) {
    expects(!failed_, method_,
            ": an earlier step failed while ranks communicated, so they may be at different steps; "
            "make the wrapper anew");
    at::Tensor loss = evaluate(closure);
    refresh();
    group_->agree(flat_.arena());
    group_->begin();
    return loss;
  }
  /// What every step ends with.
  void end_step() {
    ++round_;
    log_.stepped();
  }

  /// \return the gradient of parameter `index`; undefined if there is none.
  [[nodiscard]] at::Tensor gradient(std::size_t index) const {
    const at::Tensor& own = flat_.arena().tensor(index).grad();
    return own.defined() && own.is_sparse() ? own.to_dense() : own;
  }
  /// \return `flat` cut into one tensor per parameter.
  [[nodiscard]] std::vector<at::Tensor> parts(const flat_tensors& flat) const {
    std::vector<at::Tensor> result;
    for (std::size_t i = 0; i < flat_.arena().size(); ++i) result.push_back(flat_.part(flat, i));
    return result;
  }
  /// Takes the user's step with other gradients, one per parameter; once for each parameter, also
  /// for tied weights, which a step of libtorch's own would move as often as they are listed.
  void step_with(const std::vector<at::Tensor>& gradients) {
    const lent_gradients lent(flat_.arena(), gradients);
    auto once = each_once(this->param_groups());
    const partial_step::selection only(this->param_groups(), once);
    Inner::step();
  }
  /// Calls `visit(index, group's options)` once for each parameter that learns.
  template <class Options, class Visit>
  void for_each_parameter(Visit visit) {
    seen_tensors seen;
    for (torch::optim::OptimizerParamGroup& group : this->param_groups()) {
      const auto& options = static_cast<const Options&>(group.options());
      for (const at::Tensor& each : group.params()) {
        const std::size_t index = flat_.arena().index_of(each);
        if (index != flat_.arena().size() && seen.add(each)) visit(index, options);
      }
    }
  }

  /// What averaging over the graph of `round` adds to `values`: \f$ \sum_j W_{ji} (v_j - v_i) \f$.
  ///
  /// Computed from the differences, not from the average: two ranks get opposite numbers along an
  /// edge, so what is summed up from step to step keeps its sum of zero, however long it goes on.
  [[nodiscard]] flat_tensors differences(const flat_tensors& values, std::int64_t round) {
    try {
      return exchange_differences(values, round);
    } catch (const mismatch_error&) {  // on every rank
      throw;
    } catch (...) {
      failed_ = true;
      throw;
    }
  }

  /// What the method remembers of `parameter`, a copy. \throws usage_error if it does not learn.
  [[nodiscard]] at::Tensor kept_of(const at::Tensor& parameter) const {
    const std::size_t index = flat_.arena().index_of(parameter);
    expects(index != flat_.arena().size(), method_,
            ": the tensor is no parameter of this optimizer that requires a gradient");
    return flat_.part(flat_.kept(), index).clone();
  }

 private:
  [[nodiscard]] flat_tensors exchange_differences(const flat_tensors& values,
                                                  std::int64_t round) const {
    communicator<Backend>& comm = group_->comm();
    const neighborhood around = links_in_round(topology_, comm.rank(), round);
    flat_tensors result;
    for (const at::Tensor& own : values) {
      const const_buffer outline = bluefog::detail::outlines(bluefog::detail::only(own)).front();
      const auto arrived = std::make_shared<bluefog::detail::arrivals>();
      auto call = bluefog::detail::check_mix(comm, method_, outline, outline, around, {});
      bluefog::detail::name_caller_stream(comm, own.device());
      std::shared_ptr<bluefog::detail::parcel> sent;
      transfer way(comm.driver(), comm.start(std::move(call), [&](auto context) {
        sent = std::make_shared<bluefog::detail::parcel>(context, bluefog::detail::only(own),
                                                         std::span<const at::Tensor>());
        return bluefog::detail::run_with(
            context,
            bluefog::detail::fetch_task(context, sent->input(), sent->layout(), around, arrived),
            sent);
      }));
      group_->wait(way);
      at::Tensor sum = at::zeros_like(own);
      for (std::size_t j = 0; j < arrived->size(); ++j)
        sum.add_(sent->tensor_like(own, (*arrived)[j].data()).sub_(own), around.sources[j].weight);
      bluefog::detail::transport_follows(comm, *sent);  // before the memory is used anew
      result.push_back(std::move(sum));
    }
    return result;
  }

  [[nodiscard]] communicator<Backend>& group() const noexcept override { return group_->comm(); }
  void finish(transfer& started) override { group_->wait(started); }
  void refresh() { log_.follow(flat_.arena(), flat_.refresh(this->param_groups())); }
  [[nodiscard]] static std::vector<std::int64_t> lengths(const flat_tensors& flat) {
    std::vector<std::int64_t> result;
    for (const at::Tensor& each : flat) result.push_back(each.numel());
    return result;
  }
  [[nodiscard]] static std::string key(std::size_t block) {
    return concat("bluefog_correction_", block);
  }

  std::string_view method_;
  std::shared_ptr<agreeing_group<Backend>> group_;
  Topology topology_;
  std::int64_t round_ = 0;
  bool failed_ = false;  // in a communication, so that ranks may be at different steps
  flat_parameters flat_;
  backward_log log_;
};

}  // namespace detail
}  // namespace bluefog::optim
