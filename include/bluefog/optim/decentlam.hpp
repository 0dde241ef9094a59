// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/sgd.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/exact_conditions.hpp>
#include <bluefog/optim/exact_method.hpp>
#include <bluefog/optim/flat_parameters.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/eigenvalues.hpp>
#include <bluefog/topology/properties.hpp>

namespace bluefog::optim {

namespace detail {

/// By how much what ranks disagree about grows per step under momentum.
struct momentum_growth {
  double factor = 0;
  std::complex<double> eigenvalue = {};  ///< of the weights; where it is largest
};

/// \return the largest modulus of the roots of \f$ z^2 - (\beta + \lambda) z + \beta \f$ over the
///         eigenvalues of `graph` but one, the 1.
template <topology::graph Graph>
[[nodiscard]] momentum_growth growth_under_momentum(const Graph& graph, double momentum) {
  auto values = topology::detail::eigenvalues(graph.size(), topology::weight_matrix(graph));
  const auto from_one = [](const std::complex<double>& value) { return std::abs(value - 1.0); };
  values.erase(std::ranges::min_element(values, {}, from_one));
  momentum_growth worst;
  for (const auto& value : values) {
    const auto middle = (momentum + value) / 2.0;
    const auto root = std::sqrt(middle * middle - momentum);
    const double factor = std::max(std::abs(middle + root), std::abs(middle - root));
    if (factor > worst.factor) worst = {factor, value};
  }
  return worst;
}

}  // namespace detail

/// SGD whose momentum does not amplify the bias of averaging. Makes averaging part of the gradient:
/// \f[ \tilde{g}_i = \frac{1}{\eta} \Bigl( x_i - \sum_j W_{ji} (x_j - \eta g_j) \Bigr), \qquad
///     m_i \leftarrow \beta m_i + \tilde{g}_i, \qquad x_i \leftarrow x_i - \eta m_i \f]
/// The last two are the user's step. Ends where diffusion without momentum ends
/// (`adapt_then_combine` with momentum ends 1 / (1 - beta) times as far).
///
/// *Is* the user's SGD: learning rate (above 0), momentum and weight decay are its own, group by
/// group. A parameter that is listed twice (tied weights) is stepped once. Construction and steps
/// are collective; every step communicates, once. If that fails, `step()` throws and nothing has
/// changed.
///
/// \tparam Inner     torch's SGD, moved in.
/// \tparam Topology  a symmetric, doubly stochastic graph; no schedule.
/// \see Yuan, Chen, Huang, Zhang, Pan, Xu and Yin, "DecentLaM: Decentralized Momentum SGD for
///      Large-batch Deep Training", ICCV 2021.
template <plain_descent Inner, backend Backend, topology::graph Topology>
class decentlam : public detail::exact_method<Inner, Backend, Topology> {
  using base = detail::exact_method<Inner, Backend, Topology>;

 public:
  /// \param inner     the user's SGD, moved in.
  /// \param model     gives the parameters their names.
  /// \param comm      used here only: the wrapper makes communicators of its own from it.
  /// \param topology  the same on every rank.
  /// \throws usage_error, with the number at fault, if the graph does not fit; mismatch_error, on
  ///         every rank, if the ranks' parameters differ.
  template <module_like Model>
  decentlam(Inner inner, const Model& model, communicator<Backend>& comm, Topology topology)
      : base(name, std::move(inner), model, comm, checked(std::move(topology), inner),
             detail::memory::none) {}

  /// \param closure  evaluates the loss, with gradients; called once, first.
  /// \return the closure's loss.
  /// \throws usage_error if a learning rate is 0; nothing was sent.
  at::Tensor step(typename Inner::LossClosure closure = nullptr) override {
    using options = torch::optim::SGDOptions;
    at::Tensor loss = this->begin_step(closure);
    const c10::AutoGradMode no_grad(false);
    const auto& flat = this->flat();
    const auto& arena = flat.arena();
    const auto adapted = flat.copy(flat.values());
    this->template for_each_parameter<options>([&](std::size_t i, const options& group) {
      expects(group.lr() > 0, name, ": the learning rate must be above 0, got ", group.lr());
      const at::Tensor target = flat.part(adapted, i);
      if (const at::Tensor own = this->gradient(i); own.defined()) target.sub_(own, group.lr());
      if (group.weight_decay() != 0)
        target.sub_(arena.tensor(i), group.lr() * group.weight_decay());
    });
    const auto gradients = this->differences(adapted, this->round());
    this->template for_each_parameter<options>([&](std::size_t i, const options& group) {
      const at::Tensor target = flat.part(gradients, i).div_(-group.lr());
      if (const at::Tensor own = this->gradient(i); own.defined()) target.add_(own);
    });
    this->step_with(this->parts(gradients));  // which adds the weight decay
    this->end_step();
    return loss;
  }

 private:
  static constexpr auto name = "decentlam";

  [[nodiscard]] static Topology checked(Topology topology, const Inner& inner) {
    detail::expect_doubly_stochastic(name, topology);
    std::string remedy = "quasi_global_momentum";
    if (!topology::is_symmetric(topology) && topology.size() <= 512) {
      const double momentum =
          static_cast<const torch::optim::SGDOptions&>(inner.defaults()).momentum();
      const auto growth = detail::growth_under_momentum(topology, momentum);
      remedy += concat(" (over this graph and with momentum ", momentum,
                       " differences between ranks would change by a factor of ", growth.factor,
                       " per step, by the eigenvalue ", growth.eigenvalue.real(), " + ",
                       std::abs(growth.eigenvalue.imag()), "i)");
    }
    detail::expect_symmetric(name, topology, remedy);
    detail::expect_spectrum_above(name, topology, -1, "-1", "give ranks a weight of their own");
    return topology;
  }
};

}  // namespace bluefog::optim
