// SPDX-License-Identifier: Apache-2.0
// bluefog_gpu_tensors operations FILE RANK SIZE     every operation on CUDA tensors
// bluefog_gpu_tensors optimizers FILE RANK SIZE     every optimizer on CUDA parameters
// bluefog_gpu_tensors digits FILE RANK SIZE FOLDER  learns the digits in FOLDER with mixed
// precision bluefog_gpu_tensors unscale                       checks of scaled gradients
// bluefog_gpu_tensors schedule                      what of communication is hidden behind compute
//
// SIZE processes meet by way of FILE. Prints one line per check: "pass NAME", "fail NAME: why", or
// "figure NAME: VALUE".
#include "gpu/tensors.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/bluefog.hpp>

#include "gpu/learn_digits.hpp"
#include "gpu/program/mirror_backend.hpp"
#include "gpu/training.hpp"

namespace {

using namespace bluefog;
using bluefog_test::gpu::finding;
using bluefog_test::gpu::mirror_backend;

at::Device device_of(communicator<nccl_backend>& comm) {
  return {at::kCUDA, static_cast<at::DeviceIndex>(comm.transport().device())};
}

/// Prints what was found on any rank. \return how much was wrong.
int report(communicator<nccl_backend>& comm, const std::vector<finding>& found,
           const std::string& where) {
  int failures = 0;
  for (const auto& [check, problem] : found) {
    const bool failed = any_of(comm, !problem.empty());
    failures += failed ? 1 : 0;
    if (comm.rank() == 0 && failed)
      std::printf("fail %s%s: %s\n", check.c_str(), where.c_str(),
                  problem.empty() ? "on another rank" : problem.c_str());
  }
  if (comm.rank() == 0 && failures == 0)
    std::printf("pass %zu checks%s\n", found.size(), where.c_str());
  std::fflush(stdout);
  return failures;
}

int operations(communicator<nccl_backend>& comm) {
  int failures = report(comm, bluefog_test::gpu::check_tensors(comm, device_of(comm)),
                        " of operations on CUDA tensors, bit-equal to the CPU's");
  communicator<nccl_backend> staged(nccl_backend(nccl::meet_over(comm)), {.ops_on_cpu = true});
  failures += report(comm, bluefog_test::gpu::check_tensors(staged, device_of(comm)),
                     " of operations on CUDA tensors that travel as host memory");
  return failures;
}

int optimizers(communicator<nccl_backend>& comm) {
  return report(comm, bluefog_test::gpu::check_training(comm, device_of(comm)),
                " of optimizers with CUDA parameters against the CPU's");
}

int digits(communicator<nccl_backend>& comm, const char* folder) {
  constexpr double goal = 0.85;  // half of the digits, which is what one rank sees, is 0.5
  const double accuracy = bluefog_test::gpu::learn_digits(comm, device_of(comm), folder);
  if (comm.rank() == 0) std::printf("figure digits recognized: %.3f\n", accuracy);
  const std::string problem =
      accuracy >= goal ? "" : "recognizes " + std::to_string(accuracy) + " of the digits";
  return report(comm, {{"digits with mixed precision", problem}}, " of learning digits");
}

int unscale() {
  constexpr auto infinity = std::numeric_limits<float>::infinity();
  int failures = 0;
  const auto check = [&](const char* name, bool right) {
    std::printf(right ? "pass %s\n" : "fail %s: the result is wrong\n", name);
    failures += right ? 0 : 1;
  };
  const at::Device device(at::kCUDA, 0);
  const auto gradients = [&](float special) {
    std::vector<at::Tensor> all;
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kFloat}) {
      all.push_back(at::arange(1, 1001, at::kFloat).to(type).to(device).view({10, 100}).t());
    }
    all.push_back(at::ones({4}));  // on the CPU
    if (special != 0) all[1][3][4] = special;
    return all;
  };
  auto finite = gradients(0);
  check("unscale: finite gradients of several types and devices",
        amp::unscale_and_check(finite, 0.25) && finite[1].equal(gradients(0)[1] * 0.25) &&
            finite[2].equal(gradients(0)[2] * 0.25) && finite[4].equal(at::full({4}, 0.25)));
  check("unscale: an infinite gradient is noticed",
        !amp::unscale_and_check(gradients(infinity), 0.25));
  check("unscale: a gradient that is no number is noticed",
        !amp::unscale_and_check(gradients(std::numeric_limits<float>::quiet_NaN()), 0.25));
  return failures;
}

/// \return the shortest of several times that `act` takes, in milliseconds.
template <class Act>
double milliseconds(const Act& act) {
  const auto stream = bluefog_test::gpu::current_stream(at::Device(at::kCUDA, 0));
  double best = 1e30;
  for (int i = 0; i < 5; ++i) {
    stream.synchronize();
    const auto begin = std::chrono::steady_clock::now();
    act();
    stream.synchronize();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    if (i > 0) best = std::min(best, time.count());
  }
  return best;
}

/// \param wrap  from an optimizer, a net and a communicator makes an optimizer that communicates.
template <class Wrap>
void show_schedule(const char* name, const Wrap& wrap) {
  const at::Device device(at::kCUDA, 0);
  torch::nn::Sequential net;
  constexpr int layers = 6;
  constexpr std::int64_t width = 4096;
  for (int i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::ReLU());
  }
  net->to(device);
  const auto x = at::randn({4096, width}, at::TensorOptions().device(device));
  communicator<mirror_backend> comm;
  auto optimizer = wrap(torch::optim::SGD(net->parameters(), 1e-4), net, comm);
  const auto steps = [&](int times) {
    mirror_backend::times = times;
    return milliseconds([&] {
             for (int i = 0; i < 4; ++i) {
               optimizer.zero_grad();
               optimizer.forward(net, x).mean().backward();
               optimizer.step();
             }
           }) /
           4;
  };
  const auto parameters = at::empty({layers * (width + 1) * width}, x.options());
  const auto other = at::empty_like(parameters);
  const double once = milliseconds([&] { other.copy_(parameters); });
  const double alone = steps(0);
  const int times = std::max(1, static_cast<int>(alone / 3 / once));  // a third of the step
  const double together = steps(times);
  const double exposed = std::max(0.0, together - alone);
  std::printf(
      "figure %s: step %.2f ms, %.2f ms of copies beside it, %.2f ms exposed, %.0f %% hidden "
      "(goal 90)\n",
      name, alone, times * once, exposed, 100 * (1 - exposed / (times * once)));
}

int schedule() {
  show_schedule("adapt_with_combine, after_step", [](auto sgd, auto& net, auto& comm) {
    return optim::adapt_with_combine(std::move(sgd), net, comm,
                                     topology::one_peer_exponential(comm.size()),
                                     {.start = optim::start::after_step});
  });
  show_schedule("adapt_with_combine, after_forward", [](auto sgd, auto& net, auto& comm) {
    return optim::adapt_with_combine(std::move(sgd), net, comm,
                                     topology::one_peer_exponential(comm.size()));
  });
  show_schedule("gradient_allreduce", [](auto sgd, auto& net, auto& comm) {
    return optim::gradient_allreduce(std::move(sgd), net, comm);
  });
  return 0;
}

int run(const std::vector<std::string_view>& words, char** argv) {
  if (words.size() == 1 && words[0] == "unscale") return unscale();
  if (words.size() == 1 && words[0] == "schedule") return schedule();
  if (words.size() < 4) return -1;
  communicator<nccl_backend> comm(
      nccl_backend(nccl::meet_by_file(argv[2], std::atoi(argv[3]), std::atoi(argv[4]))));
  if (words[0] == "operations") return operations(comm);
  if (words[0] == "optimizers") return optimizers(comm);
  if (words[0] == "digits" && words.size() == 5) return digits(comm, argv[5]);
  return -1;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // what was found remains, however this ends
  try {
    const int failures = run({argv + 1, argv + argc}, argv);
    if (failures < 0) std::fprintf(stderr, "what to run is said at the top of tensors.cpp\n");
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
  } catch (const std::exception& problem) {
    std::printf("fail the program: %s\n", problem.what());
  }
  return EXIT_FAILURE;
}
