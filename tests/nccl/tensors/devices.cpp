// SPDX-License-Identifier: Apache-2.0
// CUDA tensors without a GPU: what tests/gpu.sh runs on one, here on the devices of the stand-in.
#include <atomic>
#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <bluefog/collective.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/optim.hpp>
#include <bluefog/tensor.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>

#include "gpu/program/tensors.hpp"
#include "nccl/support.hpp"
#include "nccl/tensors/device_tensors.hpp"
#include "tensor/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

using nccl_communicator = communicator<nccl_backend>;

at::Device device_of(nccl_communicator& comm) {
  return {at::kCUDA, static_cast<at::DeviceIndex>(comm.transport().device())};
}

template <class Comm>
void require_all(Comm& comm, at::Device device) {
  gpu::findings found;
  gpu::check_tensors(comm, device, found);
  gpu::check_training(comm, device, found);
  for (const auto& [check, problem] : found) require_equal(check + ": " + problem, check + ": ");
}

/// Requires that a model which moves once `wrap(model)` has wrapped it is refused with `text`, and
/// learns on when it is back.
template <class Wrap>
void require_refused_move(at::Device from, at::Device to, std::string_view text, const Wrap& wrap) {
  torch::nn::Linear model(torch::nn::LinearOptions(2, 1).bias(false));
  model->to(from);
  auto optimizer = wrap(model);
  const auto learn = [&](at::Device where) {
    optimizer.zero_grad();
    optimizer.forward(model, at::ones({1, 2}, where)).sum().backward();
    optimizer.step();
  };
  learn(from);
  model->to(to);
  require_contains(require_throws<usage_error>([&] { learn(to); }), text);
  model->to(from);
  const at::Tensor before = model->weight.detach().cpu().clone();
  learn(from);
  require_tensor(model->weight.cpu(), before - 1);
}

}  // namespace

TEST_CASE("CUDA tensors on their own device are as on the CPU, bit for bit", "[nccl][tensor]") {
  for (const int ranks : {1, 2, 3})
    CHECK(run_nccl_ranks(ranks, [](nccl_communicator& comm) { require_all(comm, device_of(comm)); },
                         {}) == "");
}

TEST_CASE("CUDA tensors travel as host memory where that is asked for", "[nccl][tensor]") {
  CHECK(run_nccl_ranks(2, [](nccl_communicator& comm) { require_all(comm, device_of(comm)); },
                       {.ops_on_cpu = true}) == "");
}

TEST_CASE("CUDA tensors travel over a transport of the host", "[nccl][tensor]") {
  for (const int ranks : {1, 2, 3})
    run_threads(ranks, [](auto& comm) {
      require_all(comm, at::Device(at::kCUDA, static_cast<at::DeviceIndex>(comm.rank())));
    });
  CHECK(stand_in::broken_rules() == "");
}

TEST_CASE("tensors of the host and of devices travel together", "[nccl][tensor]") {
  CHECK(run_nccl_ranks(2,
                       [](nccl_communicator& comm) {
                         const std::vector<at::Tensor> both{
                             at::full({3}, comm.rank(), at::kFloat),
                             at::full({2}, comm.rank(), at::kFloat).to(device_of(comm))};
                         for (const at::Tensor& each : neighbor_allreduce(
                                  comm, std::span(both), topology::fully_connected(2)))
                           require(each.cpu().allclose(at::full(each.sizes(), 0.5, at::kFloat)));
                       },
                       {}) == "");
}

TEST_CASE("memory that only an operation still has is not used for anything else",
          "[nccl][tensor]") {
  for (const bool check : {false, true})
    CHECK(run_nccl_ranks(
              2,
              [](nccl_communicator& comm) {
                const nccl::device_scope scope(comm.transport().device());
                const auto device = device_of(comm);
                const c10::StreamGuard on(device_tensors::guard().getStreamFromGlobalPool(
                    device, /*isHighPriority=*/false));
                const auto busy = [&] {  // so that messages are launched, and not over
                  stand_in::stream_of(comm.transport().stream(), "a test")->give([] {
                    std::this_thread::sleep_for(std::chrono::milliseconds(100));
                  });
                };
                const auto launched = [] {
                  std::this_thread::sleep_for(std::chrono::milliseconds(40));
                };
                const auto x = at::full({1000}, 1.0 + comm.rank(), at::kFloat).to(device);
                busy();
                auto mixed =
                    neighbor_allreduce_nonblocking(comm, x * 2, topology::fully_connected(2));
                launched();
                const auto other = at::empty_like(x);  // memory that is free is spoilt
                require(mixed.wait().cpu().allclose(at::full({1000}, 3.0, at::kFloat)));

                busy();
                auto rows = allgather_nonblocking(comm, (x * 2).view({10, 100}).t());
                launched();
                const auto another = at::empty_like(x);
                require(rows.wait().cpu().equal(at::cat(
                    {at::full({100, 10}, 2.0, at::kFloat), at::full({100, 10}, 4.0, at::kFloat)})));
              },
              {.check = check}) == "");
}

TEST_CASE("gradients are scaled and converted in one pass before their journey, and in one after",
          "[nccl][optim]") {
  constexpr int elements = 1234;
  for (const auto type : {at::kFloat, at::kDouble})
    for (const double predivide : {1.0, 4.0}) {
      auto& counted = device_tensors::counted();
      counted.elements = elements;
      std::atomic<int> passes = 0;
      CHECK(run_nccl_ranks(
                1,
                [&](nccl_communicator& comm) {
                  torch::nn::Module model;
                  const auto options = at::TensorOptions(type).device(device_of(comm));
                  const auto x = model.register_parameter("x", torch::zeros({elements}, options));
                  optim::gradient_allreduce optimizer(
                      torch::optim::SGD(model.parameters(), 1.0), model, comm,
                      {.compression = optim::compression::fp16, .predivide = predivide});
                  x.mutable_grad() = at::full({elements}, 1e5 * predivide / 4, options);
                  counted.passes = 0;
                  optimizer.synchronize();
                  passes = counted.passes.load();
                  require(x.grad().scalar_type() == type, "the gradient's own type");
                  // Half precision ends at 65504.
                  require(x.grad().cpu().allclose(
                      at::full({elements}, 1e5 * predivide / 4, at::TensorOptions(type)), 1e-3));
                },
                {}) == "");
      CHECK(passes == 2);
      counted.elements = -1;
    }
}

TEST_CASE("gradients of several types and devices are unscaled, and what is not finite is noticed",
          "[nccl][amp]") {
  CHECK(gpu::program::unscale() == 0);
  CHECK(stand_in::broken_rules() == "");
}

TEST_CASE("what is sent to a mirror comes back", "[nccl][tensor]") {
  communicator<gpu::mirror_backend> comm;
  const auto x = at::arange(6, at::kFloat).view({2, 3}).to(at::Device(at::kCUDA, 0));
  CHECK(neighbor_allreduce(comm, x, topology::fully_connected(2)).cpu().equal(x.cpu()));
  CHECK(allgather(comm, x.t()).cpu().equal(at::cat({x.t(), x.t()}).cpu()));
  CHECK(stand_in::broken_rules() == "");
}

TEST_CASE("optimizers follow the stream that the program works on", "[nccl][tensor]") {
  CHECK(run_nccl_ranks(2,
                       [](nccl_communicator& comm) {
                         const nccl::device_scope scope(comm.transport().device());
                         const c10::StreamGuard on(device_tensors::guard().getStreamFromGlobalPool(
                             device_of(comm), /*isHighPriority=*/false));
                         require_all(comm, device_of(comm));
                       },
                       {}) == "");
}

TEST_CASE("values of the host for a result of the device are refused before anything is sent",
          "[nccl][tensor]") {
  CHECK(run_nccl_ranks(2,
                       [](nccl_communicator& comm) {
                         std::vector<float> host(4, 1.0F);
                         const auto x = at::ones({4}, at::TensorOptions().device(device_of(comm)));
                         const std::span<float> device(x.data_ptr<float>(), 4);
                         const auto refused = [&](auto act) {
                           require_contains(
                               require_throws<usage_error>(act),
                               "input lies in the host's memory, output in a device's");
                         };
                         const auto graph = topology::fully_connected(2);
                         refused([&] { allreduce(comm, host, device, reduce_op::sum); });
                         refused([&] { broadcast(comm, host, device, 0); });
                         refused([&] { neighbor_allreduce(comm, host, device, graph); });
                         refused([&] { pair_gossip(comm, host, device, 1 - comm.rank()); });
                         require_contains(require_throws<usage_error>([&] {
                                            allreduce(comm, device, host, reduce_op::sum);
                                          }),
                                          "input lies in a device's memory, output in the host's");
                         allreduce(comm, device, device, reduce_op::sum);
                         require(x.cpu().equal(at::full({4}, 2.0, at::kFloat)));
                       },
                       {}) == "");
}

TEST_CASE("a tensor on another device than the communicator's is refused, with both",
          "[nccl][tensor]") {
  CHECK(run_nccl_ranks(2,
                       [](nccl_communicator& comm) {
                         const at::Device other(at::kCUDA, static_cast<at::DeviceIndex>(5));
                         const auto x = at::ones({3}, at::TensorOptions().device(other));
                         const std::string own =
                             "cuda:" + std::to_string(comm.transport().device());
                         const std::string text =
                             require_throws<usage_error>([&] { return allreduce(comm, x); });
                         require(text.starts_with(
                             "nccl_backend: a tensor is on cuda:5, and this communicator "
                             "works on " +
                             own));
                         require(allreduce(comm, x.to(device_of(comm))).cpu().equal(at::ones({3})));
                       },
                       {}) == "");
}

TEST_CASE("a model that moves to another device while it is wrapped is refused, with both",
          "[nccl][optim]") {
  const at::Device host(at::kCPU), first(at::kCUDA, 0), second(at::kCUDA, 1);
  for (const auto& [from, to] : {std::pair(host, first), {first, host}, {first, second}})
    run_threads(2, [&](auto& comm) {
      const auto sgd = [](torch::nn::Linear& model) {
        return torch::optim::SGD(model->parameters(), 1.0);
      };
      require_refused_move(from, to,
                           concat("parameter_arena: parameter \"weight\" was on ", from,
                                  " when it was wrapped and is on ", to, " now"),
                           [&](torch::nn::Linear& model) {
                             broadcast_parameters(comm, *model, 0);
                             return optim::adapt_then_combine(
                                 sgd(model), *model, comm, topology::fully_connected(comm.size()));
                           });
      require_refused_move(from, to,
                           concat("gradient_allreduce: parameter \"weight\" was Float [1, 2] on ",
                                  from, " when it was wrapped and is Float [1, 2] on ", to, " now"),
                           [&](torch::nn::Linear& model) {
                             return optim::gradient_allreduce(sgd(model), *model, comm);
                           });
    });
  CHECK(stand_in::broken_rules() == "");
}
