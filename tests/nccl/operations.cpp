// SPDX-License-Identifier: Apache-2.0
// What tests/gpu.sh runs on a GPU, here over the stand-in, so that it is right when a GPU is there.
#include "gpu/operations.hpp"

#include "nccl/support.hpp"

using namespace bluefog_test;

TEST_CASE(
    "operations on memory of the device and of the host are the thread backend's, bit for bit",
    "[nccl][operations]") {
  for (const int ranks : {1, 2, 3}) {
    const auto problem = run_nccl_ranks(ranks,
                                        [](auto& comm) {
                                          gpu::findings found;
                                          gpu::check_operations(comm, found);
                                          require(found.size() > 50);
                                          for (const auto& [check, what] : found)
                                            require_equal(check + ": " + what, check + ": ");
                                        },
                                        {});
    CHECK(problem == "");
  }
}
