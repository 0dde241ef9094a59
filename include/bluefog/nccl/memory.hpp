// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include <bluefog/core/scratch.hpp>
#include <bluefog/nccl/check.hpp>

namespace bluefog::nccl {

/// \return temporary memory of the device that is current when a block is acquired. Blocks are used
///         in the order of one stream, so one may go back while the stream still works on it.
///         They are kept: to free one would wait for the device.
[[nodiscard]] inline scratch_pool device_pool() {
  return scratch_pool({.allocate =
                           [](std::size_t bytes) {
                             void* memory = nullptr;
                             check(cudaMalloc(&memory, bytes), "cudaMalloc");
                             return static_cast<std::byte*>(memory);
                           },
                       .release =
                           [](std::byte* memory) noexcept {
                             // Refused once the process ends, when the driver has freed it.
                             static_cast<void>(cudaFree(memory));
                           },
                       .dear = true});
}

/// \return temporary host memory that the device reads and writes by itself.
[[nodiscard]] inline scratch_pool pinned_pool() {
  return scratch_pool(
      {.allocate =
           [](std::size_t bytes) {
             void* memory = nullptr;
             check(cudaMallocHost(&memory, bytes), "cudaMallocHost");
             return static_cast<std::byte*>(memory);
           },
       .release = [](std::byte* memory) noexcept { static_cast<void>(cudaFreeHost(memory)); },
       .dear = true});
}

}  // namespace bluefog::nccl
