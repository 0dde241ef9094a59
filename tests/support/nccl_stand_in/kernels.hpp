// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace bluefog_test::stand_in {

/// Memory that a kernel reads or writes.
struct kernel_memory {
  const void* data;
  std::size_t bytes;
};

/// A kernel of the library's CUDA source, compiled for the host.
struct host_kernel {
  const char* name;
  std::size_t argument_bytes;
  void (*run)(const void* arguments);
  std::vector<kernel_memory> (*memory)(const void* arguments);
};

/// \return null if the source has none of this name.
[[nodiscard]] const host_kernel* find_kernel(const char* name);

/// Runs it as a grid of a few threads, one after the other.
void run_kernel(const host_kernel& it, const void* arguments);

}  // namespace bluefog_test::stand_in
