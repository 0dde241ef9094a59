// SPDX-License-Identifier: Apache-2.0
//
// What a wrapper costs around torch's SGD, on 161 tensors as in ResNet-50: a step that does not
// communicate against the plain optimizer's, the messages of one that does, and the memory it takes
// beyond the model; then how the cost of averaging grows with the parameters and with the ranks.
// The loss is the cheapest one that gives every parameter a gradient, so that little hides a
// wrapper's own work.
//
//   mpirun -np 2 optimizer_cost [REPEATS]
//
// The goals: 1.02 for a local step; no more messages than buckets of 25 MiB, or to several
// neighbours than pieces of 1 MiB; at most one more copy of the parameters, to 1 %, and two pieces
// where a rank has several neighbours; 20 us for a step that averages one number; 4.2 times the
// time for 4 times the parameters; 1.3 times the processor time per rank for all ranks instead of
// pairs. With more ranks than cores only processor time is judged.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <malloc.h>
#include <mpi.h>
#include <torch/torch.h>

#include <bluefog/communicator.hpp>
#include <bluefog/mpi.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/optim/gradient_allreduce.hpp>
#include <bluefog/topology/exponential.hpp>
#include <bluefog/topology/neighborhood.hpp>
#include <bluefog/topology/neighborhood_of.hpp>
#include <bluefog/topology/one_peer_exponential.hpp>

#include "json_lines.hpp"
#include "protocol.hpp"
#include "resnet_50.hpp"

namespace {

using comm_type = bluefog::communicator<bluefog::mpi_backend>;
namespace optim = bluefog::optim;

constexpr int never = 1 << 30;  // steps per communication
constexpr std::int64_t bucket_bytes = 25 << 20;
constexpr std::int64_t piece_bytes = 1 << 20;  // where ranks have several neighbours

/// Parameters, and a loss that is linear in them.
class network : public torch::nn::Module {
 public:
  explicit network(const std::vector<std::size_t>& counts) {
    const auto longest = static_cast<std::int64_t>(std::ranges::max(counts));
    slope_ = torch::linspace(-1, 1, longest, at::kFloat);
    for (const std::size_t count : counts) {
      count_ += static_cast<std::int64_t>(count);
      register_parameter(bluefog::concat("p", parameters(false).size()),
                         torch::linspace(0, 1, static_cast<std::int64_t>(count), at::kFloat));
    }
    all_ = parameters();
  }

  at::Tensor forward() {
    at::Tensor loss = torch::zeros({}, at::kFloat);
    for (const at::Tensor& each : all_) loss = loss + each.dot(slope_.narrow(0, 0, each.numel()));
    return loss;
  }
  [[nodiscard]] std::int64_t bytes() const { return 4 * count_; }

 private:
  at::Tensor slope_;
  std::vector<at::Tensor> all_;
  std::int64_t count_ = 0;
};

torch::optim::SGD sgd_over(const network& net) {
  return torch::optim::SGD(net.parameters(), torch::optim::SGDOptions(1e-6).momentum(0.9));
}

template <class Optimizer>
void train(Optimizer& optimizer, network& net) {
  optimizer.zero_grad();
  if constexpr (requires { optimizer.forward(net); })
    optimizer.forward(net).backward();
  else
    net.forward().backward();
  optimizer.step();
}

/// \return a line of /proc/self/status, in bytes.
double process_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == key + ":") {
      double kibibytes = 0;
      status >> kibibytes;
      return kibibytes * 1024;
    }
  return 0;
}
/// From now on the peak is that of what comes.
void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

class report {
 public:
  explicit report(const comm_type& comm) : ranks_(comm.size()), speaks_(comm.rank() == 0) {}

  void row(const char* id, const char* what, const char* against, double value, double target) {
    if (!speaks_) return;
    const char* verdict = target == 0 ? "no goal" : value <= target ? "met" : "MISSED";
    std::array<char, 400> row{};
    std::snprintf(row.data(), row.size(), "%-34s %-28s %10.3f %8.2f %s\n", what, against, value,
                  target, verdict);
    rows_ += row.data();
    lines_.add(
        "{\"id\": \"%s\", \"work\": \"%s\", \"peer\": \"%s\", \"ranks\": %d, \"value\": %.4f, "
        "\"target\": %.2f, \"verdict\": \"%s\", \"valid\": ",
        id, what, against, ranks_, value, target, verdict);
  }

  void print(const std::string& valid) {
    if (!speaks_) return;
    std::printf("%-34s %-28s %10s %8s\n%s\n", "work", "against", "value", "target", rows_.c_str());
    lines_.print(valid);
  }

 private:
  int ranks_;
  bool speaks_;
  std::string rows_;
  json_lines lines_;
};

/// \return time if each rank has a core, else processor time.
double judged(const comm_type& comm, const protocol::comparison& result) {
  return protocol::enough_cores(comm.size()) ? result.ratio : result.processor;
}

/// Where memory happens to lie moves a step by some percent, more than a wrapper does: so this
/// takes several places, in half of which the other contestant comes first. \param make  gives the
/// optimizer of a network. \return the geometric mean of its time over torch's SGD's.
template <class Make>
double against_sgd(const comm_type& comm, int repeats, Make make) {
  const auto ratio = [&](network& net, network& plain) {
    auto optimizer = make(net);
    auto sgd = sgd_over(plain);
    return judged(comm, protocol::compare([&] { train(optimizer, net); },
                                          [&] { train(sgd, plain); }, 1, (repeats + 1) / 2));
  };
  constexpr int places = 8;
  double product = 1;
  for (int k = 0; k < places; ++k) {
    network one(resnet_50()), other(resnet_50());
    product *= k % 2 == 0 ? ratio(one, other) : ratio(other, one);
  }
  return std::pow(product, 1.0 / places);
}

void measure_local_steps(comm_type& comm, report& out, int repeats) {
  const auto sent = comm.statistics().bytes_sent;
  const double combining = against_sgd(comm, repeats, [&](const network& net) {
    return optim::adapt_with_combine(sgd_over(net), net, comm,
                                     {.num_steps_per_communication = never});
  });
  const double adapting = against_sgd(comm, repeats, [&](const network& net) {
    return optim::adapt_then_combine(sgd_over(net), net, comm, {.backward_passes_per_step = never});
  });
  const double reducing = against_sgd(comm, repeats, [&](const network& net) {
    return optim::gradient_allreduce(sgd_over(net), net, comm, {.backward_passes_per_step = never});
  });
  protocol::require(comm.statistics().bytes_sent == sent, "a local step has sent something");
  out.row("local", "torch's SGD", "torch's SGD", against_sgd(comm, repeats, sgd_over), 0);
  out.row("local", "local step, adapt_with_combine", "torch's SGD", combining, 1.02);
  out.row("local", "local step, adapt_then_combine", "torch's SGD", adapting, 1.02);
  out.row("local", "local step, gradient_allreduce", "torch's SGD", reducing, 1.02);
}

/// The messages of a step that averages over `topology`, and the most memory that it takes.
template <class Topology>
void measure_messages_and_memory(comm_type& comm, report& out, const Topology& topology,
                                 const bluefog::neighborhood& links, const char* memory) {
  mallopt(M_MMAP_THRESHOLD, 64 << 10);  // what is freed goes back to the system
  network net(resnet_50());
  const auto bytes = static_cast<double>(net.bytes());
  auto sgd = sgd_over(net);
  forget_peak();
  for (int k = 0; k < 2; ++k) train(sgd, net);
  std::vector<float> some(1 << 20);  // MPI's own memory is not the wrapper's
  for (int k = 0; k < 3; ++k) bluefog::neighbor_allreduce(comm, some, some);
  const double before = process_bytes("VmHWM");
  optim::adapt_with_combine optimizer(std::move(sgd), net, comm, topology);
  forget_peak();
  train(optimizer, net);
  const auto sent = comm.statistics();
  train(optimizer, net);
  const auto messages = comm.statistics().messages_sent - sent.messages_sent;
  // Buckets end where tensors end, so there may be one more than full ones; and each of them, cut
  // in pieces, has a shorter last one.
  const auto buckets = (net.bytes() + bucket_bytes - 1) / bucket_bytes + 1;
  const bool whole = links.destinations.size() <= 1;
  const auto most = whole ? buckets : net.bytes() / piece_bytes + buckets;
  const auto destinations =
      static_cast<double>(std::max<std::size_t>(1, links.destinations.size()));
  out.row("messages", "messages to each, 161 tensors",
          whole ? "buckets of 25 MiB" : "pieces of 1 MiB",
          static_cast<double>(messages) / destinations, static_cast<double>(most));
  // What several neighbours send is received in one piece at a time, of this step or of the next.
  const double pieces = whole ? 0 : 2 * static_cast<double>(piece_bytes);
  out.row("B20", memory, "bytes of the parameters", (process_bytes("VmHWM") - before) / bytes,
          1.01 + pieces / bytes);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
}

void measure_messages_and_memory(comm_type& comm, report& out) {
  namespace topology = bluefog::topology;
  const topology::one_peer_exponential one_peer(comm.size());
  measure_messages_and_memory(comm, out, one_peer, one_peer.rounds(comm.rank())[0],
                              "memory beyond plain SGD's");
  if (comm.size() <= 2) return;  // the same graph
  const topology::exponential all_peers(comm.size());
  const auto links = topology::neighborhood_of(all_peers, comm.rank());
  measure_messages_and_memory(comm, out, all_peers, links, "memory, exponential graph");
}

void measure_parameter_scaling(comm_type& comm, report& out, int repeats) {
  constexpr std::size_t million = 1000 * 1000;
  {
    network one({1}), other({1});
    auto sgd = sgd_over(other);
    optim::adapt_with_combine optimizer(sgd_over(one), one, comm);
    const auto fixed =
        protocol::compare([&] { train(optimizer, one); }, [&] { train(sgd, other); }, 500, repeats);
    out.row("B14", "step that averages one number, us", "torch's SGD, difference",
            (fixed.ours - fixed.theirs) * 1e6, comm.size() == 2 ? 20 : 0);
  }
  network large(std::vector<std::size_t>(4, 25 * million)), small({25 * million});
  optim::adapt_with_combine with_large(sgd_over(large), large, comm);
  optim::adapt_with_combine with_small(sgd_over(small), small, comm);
  const auto growth = protocol::compare([&] { train(with_large, large); },
                                        [&] { train(with_small, small); }, 1, repeats);
  out.row("B14", "step with 100 M parameters", "with 25 M", judged(comm, growth), 4.2);
}

void measure_rank_scaling(comm_type& comm, report& out, int repeats) {
  if (comm.size() < 4 || comm.size() % 2 != 0) return;
  auto pair = comm.split(comm.rank() / 2);
  auto values = protocol::random_floats(1 << 20, static_cast<unsigned>(comm.rank()));
  auto twin = values, theirs = values, in_pairs = values;
  const auto all_rounds = bluefog::topology::one_peer_exponential(comm.size()).rounds(comm.rank());
  const auto pair_rounds = bluefog::topology::one_peer_exponential(2).rounds(pair.rank());
  std::ptrdiff_t round = 0;
  const auto ours = protocol::compare(
      [&] { bluefog::neighbor_allreduce(comm, values, values, all_rounds[round++]); },
      [&] { bluefog::neighbor_allreduce(pair, twin, twin, pair_rounds[0]); }, 2, repeats);
  out.row("B13", "processor time, all ranks", "pairs", ours.processor, 1.3);

  MPI_Comm two = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, comm.rank() / 2, comm.rank(), &two);
  const auto sum = [](std::vector<float>& x, MPI_Comm among) {
    MPI_Allreduce(MPI_IN_PLACE, x.data(), static_cast<int>(x.size()), MPI_FLOAT, MPI_MAX, among);
  };
  const auto collective = protocol::compare([&] { sum(theirs, MPI_COMM_WORLD); },
                                            [&] { sum(in_pairs, two); }, 2, repeats);
  MPI_Comm_free(&two);
  out.row("B13", "processor time, MPI_Allreduce", "pairs", collective.processor, 0);
}

}  // namespace

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::max(1, std::atoi(argv[1])) : 5;
  at::set_num_threads(1);
  comm_type comm;
  protocol::calibration quiet(comm.rank());
  report out(comm);
  measure_messages_and_memory(comm, out);  // first: memory that is free already would not count
  if (comm.size() <= 2) {
    measure_local_steps(comm, out, repeats);
    measure_parameter_scaling(comm, out, repeats);
  }
  measure_rank_scaling(comm, out, repeats);
  out.print(quiet.valid());
}
