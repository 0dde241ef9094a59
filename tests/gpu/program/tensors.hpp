// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/bluefog.hpp>

#include "gpu/learn_digits.hpp"
#include "gpu/program/mirror_backend.hpp"
#include "gpu/program/report.hpp"
#include "gpu/tensors.hpp"
#include "gpu/training.hpp"

/// What bluefog_gpu_tensors does. A header, so that the tests compile it, where no GPU is either,
/// and run what of it one process can do on the devices of the stand-in.
namespace bluefog_test::gpu::program {

using nccl_communicator = bluefog::communicator<bluefog::nccl_backend>;

inline at::Device device_of(nccl_communicator& comm) {
  return {at::kCUDA, static_cast<at::DeviceIndex>(comm.transport().device())};
}

/// \param check  `check(comm, device, found)`.
template <class Check>
int check_in_pair(nccl_communicator& comm, const std::string& where, const Check& check) {
  auto found = printed_findings(comm.rank(), where);
  check(comm, device_of(comm), found);
  return conclude(comm, found, where);
}

inline int operations(nccl_communicator& comm) {
  const auto check = [](auto&&... arguments) { check_tensors(arguments...); };
  const int failures =
      check_in_pair(comm, " of operations on CUDA tensors, bit-equal to the CPU's", check);
  nccl_communicator staged(bluefog::nccl_backend(bluefog::nccl::meet_over(comm)),
                           {.ops_on_cpu = true});
  return failures +
         check_in_pair(staged, " of operations on CUDA tensors that travel as host memory", check);
}

inline int optimizers(nccl_communicator& comm) {
  return check_in_pair(comm, " of optimizers with CUDA parameters against the CPU's",
                       [](auto&&... arguments) { check_training(arguments...); });
}

inline int digits(nccl_communicator& comm, const char* folder) {
  auto found = printed_findings(comm.rank());
  found.add("digits with mixed precision", [&]() -> std::string {
    const double accuracy = learn_digits(comm, device_of(comm), folder);
    if (comm.rank() == 0) std::printf("figure digits recognized: %.3f\n", accuracy);
    return accuracy >= digits_goal ? ""
                                   : "recognizes " + std::to_string(accuracy) + " of the digits";
  });
  return conclude(comm, found);
}

inline int unscale() {
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
        bluefog::amp::unscale_and_check(finite, 0.25) && finite[1].equal(gradients(0)[1] * 0.25) &&
            finite[2].equal(gradients(0)[2] * 0.25) && finite[4].equal(at::full({4}, 0.25)));
  check("unscale: an infinite gradient is noticed",
        !bluefog::amp::unscale_and_check(gradients(infinity), 0.25));
  check("unscale: a gradient that is no number is noticed",
        !bluefog::amp::unscale_and_check(gradients(std::numeric_limits<float>::quiet_NaN()), 0.25));
  return failures;
}

/// \return the shortest of several times that `act` takes, in milliseconds.
template <class Act>
double milliseconds(const Act& act) {
  const auto stream = current_stream(at::Device(at::kCUDA, 0));
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

/// Says whether `value` is large enough. \return how much was wrong.
inline int reaches(double value, double goal, const std::string& what) {
  std::printf("%s %s: %.2f, goal %.2f\n", value >= goal ? "pass" : "fail", what.c_str(), value,
              goal);
  return value >= goal ? 0 : 1;
}

/// Averages an array in place with `others` more, where libtorch needs a kernel for each that moves
/// three arrays, and one that moves two: 2 + 3 d where ours moves 2 + d, so 5/3 is the most there
/// can be with one, 11/5 with three. \return how much was wrong.
inline int average(std::int64_t millions, std::size_t others, double goal) {
  const auto options = at::TensorOptions().device(at::Device(at::kCUDA, 0));
  const auto& on = bluefog::nccl::kernels::of(0);
  const std::int64_t count = millions * 1000000;
  const auto own = at::randn({count}, options);
  const auto wanted = own.clone();
  const double weight = 1.0 / static_cast<double>(others + 1);  // a power of two: exact products
  std::vector<at::Tensor> tensors;
  std::vector<bluefog::kernel::weighted_input> inputs;
  for (std::size_t i = 0; i < others; ++i) {
    tensors.push_back(at::randn({count}, options));
    inputs.push_back({weight, static_cast<const std::byte*>(tensors.back().data_ptr())});
  }
  const bluefog::mutable_buffer values{static_cast<std::byte*>(own.data_ptr()), count,
                                       bluefog::dtype::float32};
  const auto ours = [&] { on.mix(nullptr, values, weight, values, inputs); };
  const auto theirs = [&] {
    wanted.mul_(weight);
    for (const auto& each : tensors) wanted.add_(each, weight);
  };
  ours();
  theirs();
  const std::string what = bluefog::concat(" with ", others, " more, ", millions, " M float32");
  const bool equal = own.equal(wanted);
  std::printf(equal ? "pass average is mul_ and add_%s\n"
                    : "fail average is mul_ and add_%s: the results differ\n",
              what.c_str());
  const auto ten_times = [](const auto& act) {
    return milliseconds([&] {
      for (int i = 0; i < 10; ++i) act();
    });
  };
  let_clocks_rise([&] { return ten_times(theirs) + ten_times(ours); });
  return (equal ? 0 : 1) + reaches(ten_times(theirs) / ten_times(ours), goal,
                                   "average, times as fast as mul_ and add_" + what);
}

/// How much of the copies that stand for communication a step hides. What they and the step's
/// computation take from each other is the device's matter, so they are also given, in pieces as
/// long, to a stream of their own at the beginning of each step: what that exposes no schedule can
/// hide.
///
/// \param wrap  from an optimizer, a net and a communicator makes an optimizer that communicates.
/// \return how much was wrong.
template <class Wrap>
int check_schedule(const char* name, const Wrap& wrap) {
  const at::Device device(at::kCUDA, 0);
  torch::nn::Sequential net;
  // So many that the first one's gradient, which nothing can hide, is a small part of all.
  constexpr int layers = 24;
  constexpr std::int64_t width = 2048;
  for (int i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(width, width));
    net->push_back(torch::nn::ReLU());
  }
  net->to(device);
  const auto x = at::randn({4096, width}, at::TensorOptions().device(device));
  bluefog::communicator<mirror_backend> comm;
  auto optimizer = wrap(torch::optim::SGD(net->parameters(), 1e-4), net, comm);
  const auto steps = [&](int times, const auto& beside) {
    mirror_backend::times = times;
    return milliseconds([&] {
             for (int i = 0; i < 4; ++i) {
               beside();
               optimizer.zero_grad();
               optimizer.forward(net, x).mean().backward();
               optimizer.step();
             }
           }) /
           4;
  };
  // As the backend copies: each parameter's memory some times in a row, to one place.
  const auto parameters = at::empty({layers, (width + 1) * width}, x.options());
  const auto place = at::empty({(width + 1) * width}, x.options());
  const auto own_stream = bluefog::nccl::make_stream();
  const auto copy = [&](int times) {
    for (int i = 0; i < layers; ++i)
      for (int k = 0; k < times; ++k)
        bluefog::nccl::check(
            cudaMemcpyAsync(place.data_ptr(), parameters[i].data_ptr(), place.nbytes(),
                            cudaMemcpyDeviceToDevice, own_stream.get()),
            "cudaMemcpyAsync");
  };
  const auto wait = [&] {
    bluefog::nccl::check(cudaStreamSynchronize(own_stream.get()), "cudaStreamSynchronize");
  };
  const auto nothing = [] {};
  const double alone = steps(0, nothing);
  const double once = milliseconds([&] {
                        copy(10);
                        wait();
                      }) /
                      10;
  const int times = std::max(1, static_cast<int>(alone / 3 / once));  // a third of the step
  const double copies = times * once;
  const double together = steps(times, nothing);
  const double unscheduled = steps(0, [&] {
    wait();
    copy(times);
  });
  wait();
  const double exposed = std::max(0.0, together - alone);
  const double lost = std::max(0.0, unscheduled - alone);
  std::printf(
      "figure %s: step %.2f ms, %.2f ms of copies beside it, %.2f ms exposed, of which %.2f ms "
      "where nothing waits for a copy\n",
      name, alone, copies, exposed, std::min(lost, exposed));
  return reaches(1 - std::max(0.0, exposed - lost) / copies, 0.9,
                 std::string(name) + ", share of the copies that is hidden, where it can be");
}

inline int schedule() {
  int failures = 0;
  failures += check_schedule("adapt_with_combine, after_step", [](auto sgd, auto& net, auto& comm) {
    return bluefog::optim::adapt_with_combine(std::move(sgd), net, comm,
                                              bluefog::topology::one_peer_exponential(comm.size()),
                                              {.start = bluefog::optim::start::after_step});
  });
  failures +=
      check_schedule("adapt_with_combine, after_forward", [](auto sgd, auto& net, auto& comm) {
        return bluefog::optim::adapt_with_combine(
            std::move(sgd), net, comm, bluefog::topology::one_peer_exponential(comm.size()));
      });
  failures += check_schedule("gradient_allreduce", [](auto sgd, auto& net, auto& comm) {
    return bluefog::optim::gradient_allreduce(std::move(sgd), net, comm);
  });
  return failures;
}

/// \return how much was wrong; negative if `words` say nothing that it can do.
inline int run(const std::vector<std::string>& words, char** argv) {
  if (words.size() == 1 && words[0] == "unscale") return unscale();
  if (words.size() == 1 && words[0] == "average")
    return average(25, 1, 1.5) + average(100, 1, 1.5) + average(25, 3, 1.8) + average(100, 3, 1.8);
  if (words.size() == 1 && words[0] == "schedule") return schedule();
  if (words.size() < 4) return -1;
  nccl_communicator comm(bluefog::nccl_backend(
      bluefog::nccl::meet_by_file(argv[2], std::atoi(argv[3]), std::atoi(argv[4]))));
  if (words[0] == "operations") return operations(comm);
  if (words[0] == "optimizers") return optimizers(comm);
  if (words[0] == "digits" && words.size() == 5) return digits(comm, argv[5]);
  return -1;
}

}  // namespace bluefog_test::gpu::program
