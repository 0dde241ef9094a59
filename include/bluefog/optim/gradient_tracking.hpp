// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/optim/exact_conditions.hpp>
#include <bluefog/optim/exact_method.hpp>
#include <bluefog/optim/flat_parameters.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/topology/one_peer_exponential.hpp>

namespace bluefog::optim {

/// Follows the average gradient of all ranks, and takes the user's step with that:
/// \f[ y_i \leftarrow \sum_j W_{ji} (y_j + g_j - g_j^{\mathrm{old}}), \qquad
///     x_i \leftarrow \sum_j W_{ji} (x_j - U(y_j)) \f]
/// with \f$ y_i = g_i \f$ in the first step, where g is the gradient and U the user's optimizer.
/// The mean of all y is the mean of all g, always, so that the ranks end together at a minimizer of
/// the sum of their losses, however different those are, with a constant learning rate. (Averaging
/// alone ends at a distance that grows with the learning rate.)
///
/// Works over directed graphs and schedules too: each round has to be doubly stochastic. *Is* the
/// user's optimizer, whichever; gradients stay the user's own. A parameter that is listed twice
/// (tied weights) is stepped once. Construction and steps are collective, and every step
/// communicates, twice: the trackers, then the parameters. If the first fails, nothing has changed;
/// if the second fails, the parameters are adapted and not combined.
///
/// \tparam Inner  the user's optimizer, moved in; not LBFGS.
/// \note Remembers one vector as long as the parameters.
/// \see Nedic, Olshevsky and Shi, "Achieving Geometric Convergence for Distributed Optimization
///      over Time-Varying Graphs", SIAM Journal on Optimization 27(4), 2017; Xu, Zhu, Soh and Xie,
///      "Augmented Distributed Gradient Methods for Multi-Agent Optimization Under Uncoordinated
///      Constant Stepsizes", CDC 2015, for this order of adapting and combining.
template <steppable Inner, backend Backend,
          averaging_topology Topology = topology::one_peer_exponential>
class gradient_tracking : public detail::exact_method<Inner, Backend, Topology> {
  using base = detail::exact_method<Inner, Backend, Topology>;

 public:
  /// \param inner     the user's optimizer, moved in.
  /// \param model     gives the parameters their names.
  /// \param comm      used here only: the wrapper makes communicators of its own from it.
  /// \param topology  a graph or schedule, the same on every rank.
  /// \throws usage_error if the topology does not fit or moves the mean; mismatch_error, on every
  ///         rank, if the ranks' parameters differ.
  template <module_like Model, std::same_as<Topology> Given>
  gradient_tracking(Inner inner, const Model& model, communicator<Backend>& comm, Given topology)
      : base(name, std::move(inner), model, comm, checked(std::move(topology)),
             detail::memory::correction) {}

  /// Averages with one peer per step: dynamic Exponential-2.
  template <module_like Model>
    requires std::same_as<Topology, topology::one_peer_exponential>
  gradient_tracking(Inner inner, const Model& model, communicator<Backend>& comm)
      : gradient_tracking(std::move(inner), model, comm,
                          topology::one_peer_exponential(comm.size())) {}

  /// \param closure  evaluates the loss, with gradients; called once, first.
  /// \return the closure's loss.
  at::Tensor step(typename Inner::LossClosure closure = nullptr) override {
    at::Tensor loss = this->begin_step(closure);
    const c10::AutoGradMode no_grad(false);
    const auto& flat = this->flat();
    const auto trackers = flat.copy(flat.kept());
    add_gradients(trackers);
    if (this->round() > 0) {
      const auto change = this->differences(trackers, this->round() - 1);
      flat.add(trackers, change);
      flat.add(flat.kept(), change);  // trackers without gradients
    }
    this->step_with(this->parts(trackers));
    flat.move(this->differences(flat.values(), this->round()));
    this->end_step();
    return loss;
  }

  /// \return by how much the tracker of `parameter` differs from this rank's gradient, after the
  ///         last step; over all ranks this sums to zero.
  [[nodiscard]] at::Tensor correction(const at::Tensor& parameter) const {
    return this->kept_of(parameter);
  }

 private:
  static constexpr auto name = "gradient_tracking";

  void add_gradients(const detail::flat_tensors& target) const {
    for (std::size_t i = 0; i < this->flat().arena().size(); ++i)
      if (const at::Tensor own = this->gradient(i); own.defined())
        this->flat().part(target, i).add_(own);
  }

  [[nodiscard]] static Topology checked(Topology topology) {
    detail::expect_doubly_stochastic(name, topology);
    return topology;
  }
};

// With a graph or schedule; without one the constructors themselves tell the types.
template <steppable Inner, module_like Model, backend Backend, averaging_topology Topology>
gradient_tracking(Inner, const Model&, communicator<Backend>&, Topology)
    -> gradient_tracking<Inner, Backend, Topology>;

}  // namespace bluefog::optim
