// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/optim/sgd.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/exact_conditions.hpp>
#include <bluefog/optim/exact_method.hpp>
#include <bluefog/optim/flat_parameters.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/topology/one_peer_exponential.hpp>

namespace bluefog::optim {

/// SGD with a momentum of how the averaged parameters move, rather than of local gradients:
/// \f[ x_i^{\mathrm{new}} = \sum_j W_{ji} \bigl( x_j - \eta (g_j + \beta \hat{m}_j) \bigr), \qquad
///     \hat{m}_i \leftarrow \beta \hat{m}_i + (1 - \beta) (x_i - x_i^{\mathrm{new}}) / \eta \f]
/// For data that differ between ranks. Ends where diffusion without momentum ends
/// (`adapt_then_combine` with momentum ends 1 / (1 - beta) times as far).
///
/// Works over directed graphs and schedules too: each round has to be doubly stochastic. *Is* the
/// user's SGD, whose momentum buffers hold \f$ \hat{m} \f$: learning rate (above 0), momentum
/// (without dampening, not Nesterov's) and weight decay are its own, group by group. A parameter
/// that is listed twice (tied weights) is stepped once. Construction and steps are collective;
/// every step communicates, once, as much as `adapt_then_combine`. If that fails, `step()` throws
/// and the parameters are adapted and not combined.
///
/// \tparam Inner  torch's SGD, moved in.
/// \see Lin, Karimireddy, Stich and Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep
///      Learning on Heterogeneous Data", ICML 2021.
template <plain_descent Inner, backend Backend,
          averaging_topology Topology = topology::one_peer_exponential>
class quasi_global_momentum : public detail::exact_method<Inner, Backend, Topology> {
  using base = detail::exact_method<Inner, Backend, Topology>;
  using group_options = torch::optim::SGDOptions;

 public:
  /// \param inner     the user's SGD, moved in.
  /// \param model     gives the parameters their names.
  /// \param comm      used here only: the wrapper makes communicators of its own from it.
  /// \param topology  a graph or schedule, the same on every rank.
  /// \throws usage_error if the topology does not fit or moves the mean, or the momentum is of
  ///         another kind; mismatch_error, on every rank, if the ranks' parameters differ.
  template <module_like Model, std::same_as<Topology> Given>
  quasi_global_momentum(Inner inner, const Model& model, communicator<Backend>& comm,
                        Given topology)
      : base(name, std::move(inner), model, comm, checked(std::move(topology)),
             detail::memory::none) {
    this->template for_each_parameter<group_options>(
        [](std::size_t, const group_options& group) { expect_supported(group); });
  }

  /// Averages with one peer per step: dynamic Exponential-2.
  template <module_like Model>
    requires std::same_as<Topology, topology::one_peer_exponential>
  quasi_global_momentum(Inner inner, const Model& model, communicator<Backend>& comm)
      : quasi_global_momentum(std::move(inner), model, comm,
                              topology::one_peer_exponential(comm.size())) {}

  /// \param closure  evaluates the loss, with gradients; called once, first.
  /// \return the closure's loss.
  /// \throws usage_error if a learning rate is 0; nothing was sent.
  at::Tensor step(typename Inner::LossClosure closure = nullptr) override {
    at::Tensor loss = this->begin_step(closure);
    const c10::AutoGradMode no_grad(false);
    const auto& flat = this->flat();
    const auto& arena = flat.arena();
    const auto momenta = copy_of_momenta();
    this->step_with(full_gradients());
    const auto change = this->differences(flat.values(), this->round());
    this->template for_each_parameter<group_options>(
        [&](std::size_t i, const group_options& group) {
          if (group.momentum() == 0) return;
          const at::Tensor buffer = buffer_of(arena.tensor(i));  // what the step went along
          buffer.sub_(flat.part(change, i), 1 / group.lr()).mul_(1 - group.momentum());
          if (momenta[i].defined()) buffer.add_(momenta[i], group.momentum());
        });
    flat.move(change);
    this->end_step();
    return loss;
  }

 private:
  static constexpr auto name = "quasi_global_momentum";

  [[nodiscard]] static Topology checked(Topology topology) {
    detail::expect_doubly_stochastic(name, topology);
    return topology;
  }
  static void expect_supported(const group_options& group) {
    expects(group.dampening() == 0 && !group.nesterov(), name,
            ": the momentum must be plain, got dampening ", group.dampening(),
            group.nesterov() ? " and Nesterov's" : "");
  }

  /// \return the user's momentum buffer of `parameter`; undefined before the first step.
  [[nodiscard]] at::Tensor buffer_of(const at::Tensor& parameter) {
    const auto found = this->state().find(parameter.unsafeGetTensorImpl());
    if (found == this->state().end()) return {};
    return static_cast<torch::optim::SGDParamState&>(*found->second).momentum_buffer();
  }

  [[nodiscard]] std::vector<at::Tensor> copy_of_momenta() {
    std::vector<at::Tensor> result(this->flat().arena().size());
    this->template for_each_parameter<group_options>(
        [&](std::size_t i, const group_options& group) {
          expect_supported(group);
          expects(group.lr() > 0, name, ": the learning rate must be above 0, got ", group.lr());
          const at::Tensor buffer = buffer_of(this->flat().arena().tensor(i));
          if (buffer.defined()) result[i] = buffer.clone();
        });
    return result;
  }

  /// \return all gradients, zeros where there is none: averaging moves those parameters as well.
  [[nodiscard]] std::vector<at::Tensor> full_gradients() const {
    std::vector<at::Tensor> result;
    for (std::size_t i = 0; i < this->flat().arena().size(); ++i) {
      result.push_back(this->gradient(i));
      if (!result.back().defined()) result.back() = at::zeros_like(this->flat().arena().tensor(i));
    }
    return result;
  }
};

// With a graph or schedule; without one the constructors themselves tell the types.
template <plain_descent Inner, module_like Model, backend Backend, averaging_topology Topology>
quasi_global_momentum(Inner, const Model&, communicator<Backend>&, Topology)
    -> quasi_global_momentum<Inner, Backend, Topology>;

}  // namespace bluefog::optim
