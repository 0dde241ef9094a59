// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/gradient_buckets.hpp>
#include <bluefog/optim/gradient_exchange.hpp>
#include <bluefog/optim/gradient_watch.hpp>
#include <bluefog/tensor/arena.hpp>

namespace bluefog::nn::detail {

/// Averages gradients over ranks within each backward. The hooks of the parameters point to it, so
/// it stays at one address, behind a shared pointer.
template <backend Backend>
class gradient_synchronizer final
    : public optim::detail::gradient_listener,
      public std::enable_shared_from_this<gradient_synchronizer<Backend>> {
 public:
  /// \param static_graph  every backward is promised to use the same parameters; checked in check
  ///                      mode.
  gradient_synchronizer(communicator<Backend>& comm, const optim::detail::bucket_options& options,
                        bool static_graph)
      : owner_(options.owner),
        exchange_(comm, options),
        checks_use_(static_graph && comm.checks()) {}

  [[nodiscard]] communicator<Backend>& comm() noexcept { return exchange_.comm(); }

  /// Takes over the parameters. Collective.
  void adopt(std::vector<named_tensor> parameters) {
    used_.assign(parameters.size(), false);
    exchange_.adopt(std::move(parameters), this->weak_from_this());
  }

  /// While the depth is not zero, backwards are not reduced.
  void pause() noexcept { ++paused_; }
  void resume() noexcept { --paused_; }
  [[nodiscard]] bool paused() const noexcept { return paused_ != 0; }

  /// A graph is about to be made, to be learnt from if `trains`.
  /// \return whether no such graph is known to wait for its backward.
  bool forward_began(bool trains) {
    exchange_.refresh();
    reduced_ = false;
    return !(trains ? std::exchange(graph_waits_, true) : graph_waits_);
  }

  void backward_began(int /*number*/, bool /*anew*/) override {
    graph_waits_ = reduced_ = reducing_ = false;
    used_.assign(used_.size(), false);
    exchange_.spoil();  // what a backward that failed has left
    reducing_ = !paused();
    if (!reducing_) return;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [self = this->shared_from_this()] { self->finish(self->broken_promise()); });
  }

  void gradient_ready(std::size_t index) override {
    if (!reducing_) return;
    used_[index] = true;
    const c10::AutoGradMode no_grad(false);
    exchange_.ready(index);
  }

  [[nodiscard]] bool changes_gradients() const noexcept override { return true; }

  /// Reduces gradients as they are, unless the last backward has done so. Collective.
  void synchronize() {
    graph_waits_ = false;
    if (!reduced_) finish(-1);
  }

 private:
  void finish(std::int64_t objection) {
    reducing_ = false;
    exchange_.refresh();
    const auto result = exchange_.reduce({.objection = objection}, /*divides=*/false);
    reduced_ = true;
    if (result.objector < 0) return;
    const auto& name = exchange_.parameters()[static_cast<std::size_t>(result.objection)].name;
    throw usage_error(concat(owner_, ": static_graph promises that every backward uses the same ",
                             "parameters, but on rank ", result.objector, " parameter \"", name,
                             "\" was used in one and not in another"));
  }

  // The first parameter that was used in one of this and the first backward only, -1 if none was.
  [[nodiscard]] std::int64_t broken_promise() {
    if (!checks_use_) return -1;
    if (promised_.empty()) promised_ = used_;
    for (std::size_t i = 0; i < used_.size(); ++i)
      if (used_[i] != promised_[i]) return static_cast<std::int64_t>(i);
    return -1;
  }

  std::string_view owner_;
  optim::detail::gradient_exchange<Backend> exchange_;
  std::vector<bool> used_;      // by the backward that is on
  std::vector<bool> promised_;  // by the first one
  bool checks_use_ = false;
  int paused_ = 0;
  bool reducing_ = false;     // the backward that is on is reduced
  bool reduced_ = false;      // gradients are those of all ranks
  bool graph_waits_ = false;  // there was a training forward since the last backward
};

}  // namespace bluefog::nn::detail
