// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <utility>

#include <ATen/core/Tensor.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/optim/averaging_optimizer.hpp>
#include <bluefog/optim/averaging_plan.hpp>
#include <bluefog/optim/mixer.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/topology/one_peer_exponential.hpp>

namespace bluefog::optim {

/// Averages the parameters with the neighbours', then takes the user's step from there (consensus,
/// decentralized gradient descent):
/// \f[ w_i \leftarrow \sum_j W_{ji} w_j - \eta\, U(\nabla f_i(w_i)) \f]
/// where U is the user's optimizer and the gradient is taken at the old \f$ w_i \f$. When they
/// begin to travel is an option, `optim::start`; unless told otherwise after the forward, so that
/// they are on their way beside the backward and may be changed between `step()` and the next
/// forward.
///
/// *Is* the user's optimizer, with its state: schedulers, `torch::save` and whatever takes a
/// `torch::optim::Optimizer&` go on working. Construction and communicating steps are collective:
/// every rank must make them, in the same order as its other operations. If a communication fails,
/// `step()` throws and no parameter has changed, but with `start::inside_backward`. Parameters that
/// do not require a gradient neither count nor travel.
///
/// Parameters may be added, frozen and unfrozen on all ranks alike, before the same communication.
/// Where ranks differ in that, that communication is a mismatch_error which names the parameter, on
/// every rank; on one that none of those ranks sends to, perhaps a later communication is. One that
/// waits elsewhere first, as in an allreduce of the program's own, does not hear of it: waits then
/// end with a timeout_error. Make the wrapper anew. Noticing it costs no message while nothing
/// changes.
///
/// \tparam Inner     the user's optimizer, moved in; not LBFGS.
/// \tparam Topology  a graph or schedule of the communicator's ranks (or of its machines, for
///                   `hierarchical_neighbor_allreduce`).
/// \note A communication among neighbours holds one more copy of the parameters until it is
///       combined. float32 and float64 from several sources are added up in it as they come. On a
///       graph that has several they come in pieces of 1 MiB, else by way of one whole bucket;
///       16-bit types, and any on `nccl_backend`, take a copy per source. A copy is also held per
///       destination whose weight is not 1, until it is sent.
/// \see Nedic and Ozdaglar, "Distributed Subgradient Methods for Multi-Agent Optimization", IEEE
///      Transactions on Automatic Control 54(1), 2009.
template <steppable Inner, backend Backend,
          averaging_topology Topology = topology::one_peer_exponential>
class adapt_with_combine : public detail::averaging_optimizer<Inner, Backend, Topology> {
  using base = detail::averaging_optimizer<Inner, Backend, Topology>;

 public:
  /// \param inner     the user's optimizer, moved in.
  /// \param model     gives the parameters their names.
  /// \param comm      used here only: the wrapper makes communicators of its own from it.
  /// \param topology  the same on every rank.
  /// \throws usage_error if an option is wrong or the topology does not fit; mismatch_error, on
  ///         every rank, if the ranks' parameters differ.
  template <module_like Model, std::same_as<Topology> Given>
  adapt_with_combine(Inner inner, const Model& model, communicator<Backend>& comm, Given topology,
                     adapt_with_combine_options options = {})
      : base(std::move(inner), model, comm, std::move(topology), plan(options)) {}

  /// Averages with one peer (or one machine) per step: dynamic Exponential-2.
  template <module_like Model>
    requires std::same_as<Topology, topology::one_peer_exponential>
  adapt_with_combine(Inner inner, const Model& model, communicator<Backend>& comm,
                     adapt_with_combine_options options = {})
      : adapt_with_combine(std::move(inner), model, comm,
                           Topology(detail::places(comm, options.communication)), options) {}

  /// Combines, if this step is to communicate, then adapts.
  /// \param closure  evaluates the loss, with gradients; called once, first.
  /// \return the closure's loss.
  at::Tensor step(typename Inner::LossClosure closure = nullptr) override {
    const at::Tensor loss = detail::evaluate(closure);
    auto& shared = this->shared();
    shared.step_began();
    this->refresh();
    if (!shared.counter().due()) {
      shared.mixing().recall();  // this step changes what is on its way, if anything is
      Inner::step();
    } else if (!shared.end_inside()) {
      shared.send_all();
      shared.apply();
      this->refresh();  // parameters added or reloaded while the others were on their way
      Inner::step();
    }
    shared.step_ended();
    return loss;
  }

 private:
  [[nodiscard]] static detail::averaging_plan plan(const adapt_with_combine_options& options) {
    constexpr auto name = "adapt_with_combine";
    return {.optimizer = name,
            .counter = {name, "num_steps_per_communication", options.num_steps_per_communication,
                        options.on_miscount},
            .passes = detail::counted::forwards,
            .communication = options.communication,
            .bucket_bytes = options.bucket_bytes,
            .global_average_every = options.global_average_every,
            .buffers = options.buffers,
            .start = options.start};
  }
};

// With a graph or schedule; without one the constructors themselves tell the types.
template <steppable Inner, module_like Model, backend Backend, averaging_topology Topology>
adapt_with_combine(Inner, const Model&, communicator<Backend>&, Topology,
                   adapt_with_combine_options = {}) -> adapt_with_combine<Inner, Backend, Topology>;

}  // namespace bluefog::optim
