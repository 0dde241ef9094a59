// SPDX-License-Identifier: Apache-2.0
// CUDA tensors of ranks of MPI, which travel as host memory; on the devices of the stand-in.
#include <vector>

#include <bluefog/mpi.hpp>
#include <bluefog/tensor.hpp>
#include <bluefog/topology.hpp>

#include "nccl/support.hpp"
#include "nccl/tensors/device_tensors.hpp"

using namespace bluefog;
using namespace bluefog_test;

TEST_CASE("CUDA tensors travel over MPI as host memory", "[nccl][tensor][mpi]") {
  communicator<mpi_backend> comm;
  const int n = comm.size();
  const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(comm.rank()));
  const auto of_rank = [&](double rank) { return at::full({5, 3}, rank).to(at::kDouble); };
  const double mean = (n - 1) / 2.0;
  // On a stream whose work is late: who does not wait for it sends what was there before.
  const c10::StreamGuard on(device_tensors::guard().getStreamFromGlobalPool(device, false));
  at::Tensor x = at::zeros({3, 5}, at::TensorOptions(at::kDouble).device(device)).t();
  x.copy_(of_rank(comm.rank()));
  const auto is = [&](const at::Tensor& y, const at::Tensor& wanted) {
    CHECK(y.device() == device);
    CHECK(y.cpu().allclose(wanted));
  };
  is(allreduce(comm, x), of_rank(mean));
  is(neighbor_allreduce(comm, x, topology::fully_connected(n)), of_rank(mean));
  is(broadcast(comm, x, n - 1), of_rank(n - 1));
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < n; ++rank) all.push_back(of_rank(rank));
  is(allgather_nonblocking(comm, x).wait(), at::cat(all));
  allreduce_(comm, x, reduce_op::sum);
  is(x, of_rank(n * mean));
  CHECK(stand_in::broken_rules() == "");
}
