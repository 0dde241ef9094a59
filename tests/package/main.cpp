// SPDX-License-Identifier: Apache-2.0
// A user's program: averages over whatever backends the package brought, and checks the result.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <vector>

#include <bluefog/bluefog.hpp>

int sources_of_rank_zero(int size);

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

/// The sum of all ranks is known to each of them.
template <class Comm>
void average(Comm& comm) {
  const std::vector<float> x(3, static_cast<float>(comm.rank()));
  std::vector<float> y(3);
  bluefog::allreduce(comm, x, y);
  const float expected = static_cast<float>(comm.size() - 1) / 2;
  require(std::abs(y[2] - expected) < 1e-6F, "allreduce gives the average of the ranks");
  bluefog::neighbor_allreduce(comm, y, y, bluefog::topology::exponential(comm.size()));
  require(std::abs(y[0] - expected) < 1e-6F, "a constant is a fixed point of neighbor_allreduce");
}

#if BLUEFOG_HAS_TORCH
template <class Comm>
void average_tensors(Comm& comm) {
  const at::Tensor mean = bluefog::allreduce(comm, at::full({2, 2}, comm.rank(), at::kFloat));
  require(mean.allclose(at::full({2, 2}, (comm.size() - 1) / 2.0, at::kFloat)), "so for tensors");
}
#endif

}  // namespace

int main() {
  require(sources_of_rank_zero(8) == 3, "rank 0 of 8 has 3 sources");
  bluefog::run_threads(3,
                       [](bluefog::communicator<bluefog::thread_backend>& comm) { average(comm); });

#if BLUEFOG_HAS_MPI
  bluefog::communicator<bluefog::mpi_backend> comm;
  average(comm);
  const bool speaks = comm.rank() == 0;
#else
  const bool speaks = true;
#endif

#if BLUEFOG_HAS_TORCH
#if BLUEFOG_HAS_MPI
  average_tensors(comm);
#else
  bluefog::run_threads(
      3, [](bluefog::communicator<bluefog::thread_backend>& each) { average_tensors(each); });
#endif
  if (speaks) std::puts("with torch");
#endif
#if BLUEFOG_HAS_NCCL
  try {
    const bluefog::nccl_backend alone({.words = std::make_shared<bluefog::nccl::local_board>()});
    require(alone.size() == 1, "a rank alone is one rank");
  } catch (const bluefog::usage_error& problem) {  // as on most machines
    require(std::string_view(problem.what()).find("device") != std::string_view::npos,
            "without a device it says so");
  }
  if (speaks) std::puts("with nccl");
#endif
  if (speaks) std::puts("bluefog works");
}
