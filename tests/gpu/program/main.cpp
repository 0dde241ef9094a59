// SPDX-License-Identifier: Apache-2.0
// bluefog_gpu operations FILE RANK SIZE    every operation; SIZE processes meet by way of FILE
// bluefog_gpu kernels                      speed of the averaging kernel against a copy
//
// Prints one line per check: "pass NAME", "fail NAME: [rank R: ]why", or "figure NAME: VALUE".
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <bluefog/bluefog.hpp>

#include "gpu/operations.hpp"
#include "gpu/program/report.hpp"

namespace {

using namespace bluefog;

int operations(const char* file, int rank, int size) {
  communicator<nccl_backend> comm(nccl::meet_by_file(file, rank, size));
  auto found = bluefog_test::gpu::printed_findings(rank);
  bluefog_test::gpu::check_operations(comm, found);
  return bluefog_test::gpu::conclude(comm, found) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/// \return the shortest of several times that each of two kinds of work takes on the device, by
///         turns, in milliseconds. Those of a third of a second, in which clocks rise, do not
///         count.
template <class First, class Second>
std::array<double, 2> milliseconds(cudaStream_t stream, const First& first, const Second& second) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  nccl::check(cudaEventCreate(&begin), "cudaEventCreate");
  nccl::check(cudaEventCreate(&end), "cudaEventCreate");
  const nccl::unique_event owners[] = {nccl::unique_event(begin), nccl::unique_event(end)};
  const auto timed = [&](const auto& give) {
    nccl::check(cudaEventRecord(begin, stream), "cudaEventRecord");
    give(stream);
    nccl::check(cudaEventRecord(end, stream), "cudaEventRecord");
    nccl::check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float time = 0;
    nccl::check(cudaEventElapsedTime(&time, begin, end), "cudaEventElapsedTime");
    return double{time};
  };
  bluefog_test::gpu::let_clocks_rise([&] { return timed(first) + timed(second); });
  std::array<double, 2> best{1e30, 1e30};
  for (int i = 0; i < 10; ++i)
    best = {std::min(best[0], timed(first)), std::min(best[1], timed(second))};
  return best;
}

int kernels() {
  nccl::check(cudaSetDevice(0), "cudaSetDevice");
  const auto stream = nccl::make_stream();
  const auto& on = nccl::kernels::of(0);
  auto memory = nccl::device_pool();
  int failures = 0;
  for (const std::int64_t millions : {25, 100, 400}) {
    const std::int64_t count = millions * 1000000;
    const auto bytes = static_cast<std::size_t>(count) * sizeof(float);
    const auto a = memory.acquire(bytes);
    const auto b = memory.acquire(bytes);
    const auto gigabytes = [&](double arrays, double time) {
      return arrays * static_cast<double>(bytes) / time / 1e6;
    };
    const std::array inputs{kernel::weighted_input{0.5, b.data()}};
    const mutable_buffer values{a.data(), count, dtype::float32};
    const auto [copying, averaging] = milliseconds(
        stream.get(),
        [&](cudaStream_t to) {
          nccl::check(cudaMemcpyAsync(a.data(), b.data(), bytes, cudaMemcpyDeviceToDevice, to),
                      "cudaMemcpyAsync");
        },
        [&](cudaStream_t to) { on.mix(to, values, 0.5, values, inputs); });
    const double copy = gigabytes(2, copying);
    const double average = gigabytes(3, averaging);
    constexpr double goal = 0.9;
    std::printf("figure copy, %d M float32: %.0f GB/s\n", static_cast<int>(millions), copy);
    std::printf("figure average, %d M float32: %.0f GB/s\n", static_cast<int>(millions), average);
    const bool reached = average >= goal * copy;
    failures += reached ? 0 : 1;
    std::printf("%s average at %.2f of a copy's speed, goal %.2f, %d M float32\n",
                reached ? "pass" : "fail", average / copy, goal, static_cast<int>(millions));
  }
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // what was found remains, however this ends
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 4 && words[0] == "operations")
      return operations(argv[2], std::atoi(argv[3]), std::atoi(argv[4]));
    if (words.size() == 1 && words[0] == "kernels") return kernels();
    std::fprintf(stderr, "usage: bluefog_gpu operations FILE RANK SIZE | bluefog_gpu kernels\n");
  } catch (const std::exception& problem) {
    bluefog_test::gpu::say_end(words, problem);
  }
  return EXIT_FAILURE;
}
