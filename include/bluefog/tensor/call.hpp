// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <bluefog/backend/check.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/tensor/arguments.hpp>
#include <bluefog/tensor/device.hpp>
#include <bluefog/tensor/gradient.hpp>
#include <bluefog/tensor/threads.hpp>

namespace bluefog::detail {

/// Where results go: to new tensors, or back to the inputs.
enum class placement : std::uint8_t { apart, in_place };

/// The tensors of an operation whose results have the shapes of its inputs.
struct tensor_arguments {
  std::vector<at::Tensor> in;
  std::vector<at::Tensor> out;
  bool gradient = false;  ///< whether autograd has to know

  /// \throws usage_error if a tensor cannot travel, or cannot be changed in place.
  tensor_arguments(std::string_view operation, std::span<const at::Tensor> inputs, placement where)
      : in(inputs.begin(), inputs.end()) {
    if (where == placement::in_place) {
      for (const at::Tensor& x : in) expects_target(operation, x);
      out = in;
      return;
    }
    for (const at::Tensor& x : in) expects_tensor(operation, x);
    gradient = needs_gradient(in);
    const c10::AutoGradMode no_graph(false);
    for (const at::Tensor& x : in) out.push_back(at::empty_like(x.detach()));
  }

  /// Tells autograd how gradients of the results become gradients of the inputs, if it has to know.
  void differentiate(std::string_view operation, adjoint::function transposed) const {
    if (!gradient) return;
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> results;
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (!c10::isFloatingType(in[i].scalar_type())) continue;
      inputs.push_back(in[i]);
      results.push_back(out[i]);
    }
    const auto node = make_adjoint(operation, inputs, std::move(transposed));
    for (const at::Tensor& result : results) node->add_result(result);
  }
};

/// Completes what check mode compares by the shapes, and by whether autograd takes part.
template <backend Backend>
void describe_tensors(const communicator<Backend>& comm, call_description& call,
                      const tensor_arguments& tensors, const auto&... rest) {
  if (comm.checks())
    call.agreement =
        concat(shapes_text(tensors.in), rest..., tensors.gradient ? " with gradient" : "");
}

/// An operation on tensors, ready to be issued.
template <class Make>
struct tensor_call {
  call_description description;
  std::vector<at::Tensor> results;  ///< written by the task
  Make make;                        ///< from an `operation_context` makes the task
};
template <class Make>
tensor_call(call_description, std::vector<at::Tensor>, Make) -> tensor_call<Make>;

/// What comes before each operation on tensors, on the calling thread.
template <backend Backend>
void prepare(communicator<Backend>& comm, std::span<const at::Tensor> tensors) {
  share_cores(comm);
  name_caller_stream(comm, tensors);
}

/// Runs the call. \return its results.
template <backend Backend, class Make>
std::vector<at::Tensor> run(communicator<Backend>& comm, tensor_call<Make> call) {
  prepare(comm, call.results);
  comm.run(std::move(call.description), std::move(call.make));
  return std::move(call.results);
}

/// Starts the call. \return its results, to come.
template <backend Backend, class Make>
request<std::vector<at::Tensor>> start(communicator<Backend>& comm, tensor_call<Make> call) {
  prepare(comm, call.results);
  auto started = comm.start(std::move(call.description), std::move(call.make));
  return {comm.driver(), std::move(started), std::move(call.results)};
}

/// Runs a call that has one result.
template <backend Backend, class Make>
at::Tensor run_single(communicator<Backend>& comm, tensor_call<Make> call) {
  return std::move(run(comm, std::move(call)).front());
}

/// Starts a call that has one result.
template <backend Backend, class Make>
request<at::Tensor> start_single(communicator<Backend>& comm, tensor_call<Make> call) {
  prepare(comm, call.results);
  auto started = comm.start(std::move(call.description), std::move(call.make));
  return {comm.driver(), std::move(started), std::move(call.results.front())};
}

}  // namespace bluefog::detail
