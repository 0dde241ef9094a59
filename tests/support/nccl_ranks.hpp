// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <bluefog/communicator.hpp>
#include <bluefog/nccl.hpp>

#include "nccl_stand_in/stand_in.hpp"

/// Ranks over the NCCL backend that are threads of this process, over the stand-in.
namespace bluefog_test {

/// Runs `body(comm)` on `ranks` ranks. \return what went wrong, empty if nothing.
template <class Body>
std::string run_nccl_ranks(int ranks, const Body& body, bluefog::communicator_options options) {
  using namespace std::chrono_literals;
  options.timeout = std::min<std::chrono::milliseconds>(options.timeout, 60s);
  const auto words = std::make_shared<bluefog::nccl::local_board>();
  std::vector<std::string> problems(static_cast<std::size_t>(ranks));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank)
      threads.emplace_back([&, rank] {
        try {
          const bluefog::nccl::meeting place{
              .rank = rank, .size = ranks, .words = words, .timeout = options.timeout};
          bluefog::communicator<bluefog::nccl_backend> comm(place, options);
          body(comm);
        } catch (const std::exception& problem) {
          problems[static_cast<std::size_t>(rank)] = problem.what();
        }
      });
  }
  std::string all;
  for (const std::string& problem : problems)
    if (!problem.empty()) all += problem + "\n";
  return all + stand_in::broken_rules();
}

/// Runs `body(comm)` on ranks whose arrays count as the host's, then as the device's memory. The
/// latter not for tests tagged [broadcast_object]: an object's bytes would count as the device's,
/// too, and be read before they have arrived. Nor with libtorch, whose CPU tensors are the host's
/// and whose tests take long.
template <class Body>
void on_nccl(const Body& body, std::string_view tags) {
#ifdef BLUEFOG_HAS_TORCH
  constexpr bool tensors = true;
#else
  constexpr bool tensors = false;
#endif
  const bool objects = tags.find("[broadcast_object]") != std::string_view::npos;
  for (const bool device : {false, true}) {
    if (device && (objects || tensors)) break;
    stand_in::all_memory_is_device(device);
    for (const int ranks : tensors  ? std::vector{1, 3}
                           : device ? std::vector{1, 2, 4, 5}
                                    : std::vector{1, 3, 8}) {
      INFO("on " << ranks << " ranks, arrays in " << (device ? "device" : "host") << " memory");
      CHECK(run_nccl_ranks(ranks, body, {}) == "");
    }
  }
  stand_in::all_memory_is_device(false);
}

}  // namespace bluefog_test
