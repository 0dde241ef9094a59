// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <utility>

#include <ATen/core/Tensor.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/averaging_optimizer.hpp>
#include <bluefog/optim/averaging_plan.hpp>
#include <bluefog/optim/mixer.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/optim/partial_step.hpp>
#include <bluefog/topology/one_peer_exponential.hpp>

namespace bluefog::optim {

/// Takes the user's step, then averages the parameters with the neighbours' (diffusion):
/// \f[ w_i \leftarrow \sum_j W_{ji} \left( w_j - \eta\, U(\nabla f_j(w_j)) \right) \f]
/// With torch's own SGD, Adam, AdamW, RMSprop and Adagrad the step goes bucket by bucket, so that
/// the first parameters travel while the others are still being adapted.
///
/// Everything else is as in `adapt_with_combine`, but that passes are counted in backwards: with
/// `backward_passes_per_step` = J, a step adapts with the sum of J gradients. If a communication
/// fails, `step()` throws; the parameters are then adapted and not combined.
///
/// \see Chen and Sayed, "Diffusion Adaptation Strategies for Distributed Optimization and Learning
///      over Networks", IEEE Transactions on Signal Processing 60(8), 2012.
template <steppable Inner, backend Backend,
          averaging_topology Topology = topology::one_peer_exponential>
class adapt_then_combine : public detail::averaging_optimizer<Inner, Backend, Topology> {
  using base = detail::averaging_optimizer<Inner, Backend, Topology>;

 public:
  /// See `adapt_with_combine`.
  template <module_like Model, std::same_as<Topology> Given>
  adapt_then_combine(Inner inner, const Model& model, communicator<Backend>& comm, Given topology,
                     adapt_then_combine_options options = {})
      : base(std::move(inner), model, comm, std::move(topology), plan(options)) {}

  /// Averages with one peer (or one machine) per step: dynamic Exponential-2.
  template <module_like Model>
    requires std::same_as<Topology, topology::one_peer_exponential>
  adapt_then_combine(Inner inner, const Model& model, communicator<Backend>& comm,
                     adapt_then_combine_options options = {})
      : adapt_then_combine(std::move(inner), model, comm,
                           Topology(detail::places(comm, options.communication)), options) {}

  /// Adapts, then combines if this step is to communicate.
  /// \param closure  evaluates the loss, with gradients; called once, first.
  /// \return the closure's loss.
  at::Tensor step(typename Inner::LossClosure closure = nullptr) override {
    const at::Tensor loss = detail::evaluate(closure);
    auto& shared = this->shared();
    shared.step_began();
    this->refresh();
    if (!shared.counter().due()) {
      Inner::step();
      shared.counter().stepped();
      return loss;
    }
    if constexpr (detail::steps_parameters_apart<Inner>) {
      step_by_parts();
    } else {
      Inner::step();
      shared.send_all();
    }
    shared.apply();
    return loss;
  }

 private:
  void step_by_parts() {
    const auto& arena = this->shared().arena();
    auto& mixing = this->shared().mixing();
    auto& groups = this->param_groups();
    const auto ranges = this->shared().ranges();
    detail::partial_step parts(groups, arena, ranges);
    try {
      this->shared().begin();
    } catch (const mismatch_error&) {  // on every rank: adapted on all, combined on none
      Inner::step();
      throw;
    }
    try {
      for (std::size_t i = 0; i < ranges.size(); ++i) {
        {
          const auto only = parts.select(groups, i);
          Inner::step();
        }
        mixing.send(arena, ranges[i]);
      }
      const auto rest = parts.select(groups, ranges.size());  // what does not travel
      Inner::step();
    } catch (...) {
      mixing.drop();
      throw;
    }
  }

  [[nodiscard]] static detail::averaging_plan plan(const adapt_then_combine_options& options) {
    constexpr auto name = "adapt_then_combine";
    return {.optimizer = name,
            .counter = {name, "backward_passes_per_step", options.backward_passes_per_step,
                        options.on_miscount},
            .passes = detail::counted::backwards,
            .communication = options.communication,
            .bucket_bytes = options.bucket_bytes,
            .global_average_every = options.global_average_every,
            .buffers = options.buffers};
  }
};

// With a graph or schedule; without one the constructors themselves tell the types.
template <steppable Inner, module_like Model, backend Backend, averaging_topology Topology>
adapt_then_combine(Inner, const Model&, communicator<Backend>&, Topology,
                   adapt_then_combine_options = {}) -> adapt_then_combine<Inner, Backend, Topology>;

}  // namespace bluefog::optim
