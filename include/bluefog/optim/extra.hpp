// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/optim/exact_conditions.hpp>
#include <bluefog/optim/exact_method.hpp>
#include <bluefog/optim/flat_parameters.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/topology/concepts.hpp>

namespace bluefog::optim {

/// Decentralized gradient descent without its bias:
/// \f[ x^{k+2} = (I + W) x^{k+1} - \tfrac12 (I + W) x^k
///       - \eta (\nabla f(x^{k+1}) - \nabla f(x^k)), \qquad x^1 = W x^0 - \eta \nabla f(x^0) \f]
/// It is computed, with U the user's step, as the equal
/// \f[ x_i \leftarrow x_i + d_i + c_i - U(g_i), \qquad c_i \leftarrow c_i + d_i / 2, \qquad
///     d_i = \sum_j W_{ji} x_j - x_i \f]
/// Ends at a minimizer of the sum of all losses, with a constant learning rate; after a change of
/// it, c settles anew. The learning rate has to be below \f$ (1 + \lambda_{\min}(W)) / L \f$, where
/// L is the largest curvature.
///
/// *Is* the user's SGD: learning-rate schedulers and momentum work as ever. Construction and steps
/// are collective; every step communicates, once. If that fails, `step()` throws and nothing has
/// changed.
///
/// \tparam Inner     torch's SGD, moved in.
/// \tparam Topology  a symmetric, doubly stochastic graph; no schedule.
/// \note Remembers one vector as long as the parameters.
/// \see Shi, Ling, Wu and Yin, "EXTRA: An Exact First-Order Algorithm for Decentralized Consensus
///      Optimization", SIAM Journal on Optimization 25(2), 2015.
template <plain_descent Inner, backend Backend, topology::graph Topology>
class extra : public detail::exact_method<Inner, Backend, Topology> {
  using base = detail::exact_method<Inner, Backend, Topology>;

 public:
  /// \param inner     the user's SGD, moved in.
  /// \param model     gives the parameters their names.
  /// \param comm      used here only: the wrapper makes communicators of its own from it.
  /// \param topology  the same on every rank.
  /// \throws usage_error, with the number at fault, if the graph does not fit; mismatch_error, on
  ///         every rank, if the ranks' parameters differ.
  template <module_like Model>
  extra(Inner inner, const Model& model, communicator<Backend>& comm, Topology topology)
      : base(name, std::move(inner), model, comm, checked(std::move(topology)),
             detail::memory::correction) {}

  /// \param closure  evaluates the loss, with gradients; called once, first.
  /// \return the closure's loss.
  at::Tensor step(typename Inner::LossClosure closure = nullptr) override {
    at::Tensor loss = this->begin_step(closure);
    const c10::AutoGradMode no_grad(false);
    const auto& flat = this->flat();
    const auto change = this->differences(flat.values(), this->round());
    Inner::step();
    flat.move(flat.kept());
    flat.move(change);
    flat.add(flat.kept(), change, 0.5);
    this->end_step();
    return loss;
  }

  /// \return what the next step adds to `parameter`; over all ranks this sums to zero.
  [[nodiscard]] at::Tensor correction(const at::Tensor& parameter) const {
    return this->kept_of(parameter);
  }

 private:
  static constexpr auto name = "extra";

  [[nodiscard]] static Topology checked(Topology topology) {
    detail::expect_doubly_stochastic(name, topology);
    detail::expect_symmetric(name, topology, "gradient_tracking");
    detail::expect_spectrum_above(name, topology, -1, "-1",
                                  "give ranks a weight of their own, or take exact_diffusion");
    return topology;
  }
};

}  // namespace bluefog::optim
