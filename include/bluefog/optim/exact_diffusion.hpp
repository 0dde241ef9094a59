// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
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

/// With what a method averages over a graph of weights W.
enum class mixing_weights : std::uint8_t {
  lazy,  ///< \f$ (I + W) / 2 \f$: every rank gives its own parameters half of the weight and more
  plain  ///< W itself: fewer steps where its eigenvalues allow it
};

/// Options of `exact_diffusion`.
struct exact_diffusion_options {
  mixing_weights weights = mixing_weights::lazy;
};

/// Diffusion without its bias. Takes the user's step, adds what the last averaging took away, and
/// averages:
/// \f[ \psi_i = x_i - U(g_i), \qquad \phi_i = \psi_i + x_i - \psi_i^{\mathrm{old}}, \qquad
///     x_i \leftarrow \sum_j \bar{W}_{ji} \phi_j \f]
/// with \f$ \phi_i = \psi_i \f$ in the first step. Ends at a minimizer of the sum of all losses,
/// with a constant learning rate; after a change of it, the correction settles anew. Averages with
/// \f$ \bar{W} = (I + W) / 2 \f$; with `mixing_weights::plain` it takes W itself and is D2, which
/// diverges unless all eigenvalues of W are above -1/3: the constructor then refuses the graph.
///
/// *Is* the user's SGD: learning-rate schedulers and momentum work as ever. Construction and steps
/// are collective; every step communicates, once, as much as `adapt_then_combine`. If that fails,
/// `step()` throws and the parameters are adapted and not combined.
///
/// \tparam Inner     torch's SGD, moved in.
/// \tparam Topology  a symmetric, doubly stochastic graph; no schedule.
/// \note Remembers one vector as long as the parameters.
/// \see Yuan, Ying, Zhao and Sayed, "Exact Diffusion for Distributed Optimization and Learning",
///      IEEE Transactions on Signal Processing 67(3), 2019; Tang, Lian, Yan, Zhang and Liu, "D2:
///      Decentralized Training over Decentralized Data", ICML 2018.
template <plain_descent Inner, backend Backend, topology::graph Topology>
class exact_diffusion : public detail::exact_method<Inner, Backend, Topology> {
  using base = detail::exact_method<Inner, Backend, Topology>;

 public:
  /// \param inner     the user's SGD, moved in.
  /// \param model     gives the parameters their names.
  /// \param comm      used here only: the wrapper makes communicators of its own from it.
  /// \param topology  the same on every rank.
  /// \throws usage_error, with the number at fault, if the graph does not fit; mismatch_error, on
  ///         every rank, if the ranks' parameters differ.
  template <module_like Model>
  exact_diffusion(Inner inner, const Model& model, communicator<Backend>& comm, Topology topology,
                  exact_diffusion_options options = {})
      : base(name, std::move(inner), model, comm, checked(std::move(topology), options),
             detail::memory::correction),
        weights_(options.weights) {}

  /// \param closure  evaluates the loss, with gradients; called once, first.
  /// \return the closure's loss.
  at::Tensor step(typename Inner::LossClosure closure = nullptr) override {
    at::Tensor loss = this->begin_step(closure);
    const c10::AutoGradMode no_grad(false);
    Inner::step();
    const auto& flat = this->flat();
    const auto corrected = flat.copy(flat.values());
    flat.add(corrected, flat.kept());
    const double share = weights_ == mixing_weights::lazy ? 0.5 : 1;
    flat.add(flat.kept(), this->differences(corrected, this->round()), share);
    flat.move(flat.kept());
    this->end_step();
    return loss;
  }

  /// \return what the next step adds to `parameter`; over all ranks this sums to zero.
  [[nodiscard]] at::Tensor correction(const at::Tensor& parameter) const {
    return this->kept_of(parameter);
  }

 private:
  static constexpr auto name = "exact_diffusion";

  [[nodiscard]] static Topology checked(Topology topology, const exact_diffusion_options& options) {
    detail::expect_doubly_stochastic(name, topology);
    detail::expect_symmetric(name, topology, "gradient_tracking");
    if (options.weights == mixing_weights::plain)
      detail::expect_spectrum_above(name, topology, -1.0 / 3, "-1/3",
                                    "average with lazy weights, (I + W) / 2, by "
                                    "mixing_weights::lazy");
    else
      static_cast<void>(detail::expect_joined(name, topology));
    return topology;
  }

  mixing_weights weights_;
};

}  // namespace bluefog::optim
