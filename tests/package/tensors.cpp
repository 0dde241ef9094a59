// SPDX-License-Identifier: Apache-2.0
// A user's program that has the component torch alone: ranks that are threads average tensors.
#include <cstdio>
#include <cstdlib>

#include <ATen/ops/full.h>

#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/thread.hpp>

int main() {
  bluefog::run_threads(3, [](bluefog::communicator<bluefog::thread_backend>& comm) {
    const at::Tensor mean = bluefog::allreduce(comm, at::full({2, 2}, comm.rank(), at::kFloat));
    if (!mean.allclose(at::full({2, 2}, 1, at::kFloat))) std::abort();
    if (comm.rank() == 0) std::printf("tensors of %d ranks averaged\n", comm.size());
  });
}
