// SPDX-License-Identifier: Apache-2.0
//
// Averaging the gradients of a network like ResNet-50, 161 tensors with 25.6 million floats: packed
// into buckets of 25 MiB (the first of 1 MiB) whose non-blocking allreduces are all in flight,
// against one MPI_Allreduce of everything, already contiguous, and a scaling. Beside it 1000
// tensors of 1000 floats, also against an MPI_Allreduce and a scaling for each.
//
//   mpirun -np 2 gradient_bucket_allreduce [REPEATS]
//
// The goals: at most 1.05 of the flat one, packing and unpacking included; 1000 small tensors at
// least three times as fast as one by one. With more ranks than cores only processor time is
// judged.

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include <mpi.h>

#include <bluefog/backend/request.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/mpi.hpp>

#include "protocol.hpp"
#include "resnet_50.hpp"

namespace {

using comm_type = bluefog::communicator<bluefog::mpi_backend>;

/// Tensors at places of their own, and buckets that they are packed into.
struct network {
  std::vector<std::vector<float>> tensors;
  struct bucket {
    std::vector<std::size_t> members;
    std::vector<float> values;
  };
  std::vector<bucket> buckets;

  network(const std::vector<std::size_t>& counts, unsigned seed) {
    constexpr std::size_t first = (std::size_t{1} << 20) / sizeof(float);
    constexpr std::size_t others = (std::size_t{25} << 20) / sizeof(float);
    for (const std::size_t count : counts)
      tensors.push_back(
          protocol::random_floats(count, seed + static_cast<unsigned>(tensors.size())));
    // The last layers' gradients are there first.
    for (std::size_t i = counts.size(); i-- > 0;) {
      const std::size_t cap = buckets.size() == 1 ? first : others;
      if (buckets.empty() || buckets.back().values.size() + counts[i] > cap) buckets.emplace_back();
      buckets.back().members.push_back(i);
      buckets.back().values.resize(buckets.back().values.size() + counts[i]);
    }
  }

  void pack(bucket& target) const {
    auto place = target.values.begin();
    for (const std::size_t i : target.members) place = std::ranges::copy(tensors[i], place).out;
  }
  void unpack(const bucket& source) {
    auto place = source.values.begin();
    for (const std::size_t i : source.members) {
      const auto end = place + static_cast<std::ptrdiff_t>(tensors[i].size());
      std::copy(place, end, tensors[i].begin());
      place = end;
    }
  }
};

void average_in_buckets(comm_type& comm, network& net) {
  std::vector<bluefog::request<void>> requests;
  for (auto& bucket : net.buckets) {
    net.pack(bucket);
    requests.push_back(bluefog::allreduce_nonblocking(comm, bucket.values, bucket.values));
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].wait();
    net.unpack(net.buckets[i]);
  }
}

void average_flat(std::span<float> values, int ranks) {
  MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM,
                MPI_COMM_WORLD);
  const auto factor = 1.0F / static_cast<float>(ranks);
  for (float& value : values) value *= factor;
}

std::string row(const comm_type& comm, const char* work, const char* peer,
                const protocol::comparison& result, double target, const std::string& valid) {
  const double judged = protocol::enough_cores(comm.size()) ? result.ratio : result.processor;
  const char* verdict = target == 0 ? "no goal" : judged <= target ? "met" : "MISSED";
  if (comm.rank() != 0) return {};
  std::printf("%-20s %-26s %10.2f %10.2f %7.3f %7.3f-%7.3f %10.3f %7.2f %s\n", work, peer,
              result.ours * 1e3, result.theirs * 1e3, result.ratio, result.least, result.largest,
              result.processor, target, verdict);
  std::array<char, 400> line{};
  std::snprintf(line.data(), line.size(),
                "{\"id\": \"B09\", \"work\": \"%s\", \"ranks\": %d, \"peer\": \"%s\", "
                "\"ratio\": %.3f, \"least\": %.3f, \"largest\": %.3f, \"processor_ratio\": %.3f, "
                "\"target\": %.2f, \"verdict\": \"%s\", \"valid\": %s}\n",
                work, comm.size(), peer, result.ratio, result.least, result.largest,
                result.processor, target, verdict, valid.c_str());
  return line.data();
}

}  // namespace

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::max(1, std::atoi(argv[1])) : 5;
  comm_type comm;
  protocol::calibration quiet(comm.rank());
  const auto seed = static_cast<unsigned>(1000 * comm.rank());

  network resnet(resnet_50(), seed);
  network small(std::vector<std::size_t>(1000, 1000), seed);
  const auto flat_of = [](const network& net) {
    std::vector<float> flat;
    for (const auto& tensor : net.tensors) flat.insert(flat.end(), tensor.begin(), tensor.end());
    return flat;
  };
  auto flat = flat_of(resnet);
  auto flat_small = flat_of(small);
  auto one_by_one = small.tensors;

  const auto with_flat = protocol::compare([&] { average_in_buckets(comm, resnet); },
                                           [&] { average_flat(flat, comm.size()); }, 1, repeats);
  const auto small_with_flat =
      protocol::compare([&] { average_in_buckets(comm, small); },
                        [&] { average_flat(flat_small, comm.size()); }, 4, repeats);
  const auto ours_again = flat_of(resnet);
  for (std::size_t i = 0; i < flat.size(); i += 997)
    protocol::require(std::fabs(flat[i] - ours_again[i]) < 1e-5F, "buckets and flat differ");
  const auto small_with_each = protocol::compare([&] { average_in_buckets(comm, small); },
                                                 [&] {
                                                   for (auto& tensor : one_by_one)
                                                     average_flat(tensor, comm.size());
                                                 },
                                                 2, repeats);

  const std::string valid = quiet.valid();
  if (comm.rank() == 0)
    std::printf("%-20s %-26s %10s %10s %7s %15s %10s %7s\n", "work", "against", "ours ms",
                "theirs ms", "ratio", "least-largest", "processor", "target");
  std::string lines =
      row(comm, "161 of ResNet-50", "one flat MPI_Allreduce", with_flat, 1.05, valid);
  lines += row(comm, "1000 small", "one flat MPI_Allreduce", small_with_flat, 0, valid);
  lines += row(comm, "1000 small", "MPI_Allreduce for each", small_with_each, 1 / 3.0, valid);
  if (comm.rank() == 0) std::printf("\n%s", lines.c_str());
}
