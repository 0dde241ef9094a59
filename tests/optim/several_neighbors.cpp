// SPDX-License-Identifier: Apache-2.0
// The averaging wrappers on graphs where a rank receives from several others.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/tensor/neighbor_allreduce.hpp>
#include <bluefog/topology.hpp>

#include "backend/support.hpp"
#include "simulation.hpp"
#include "support/faulty_backend.hpp"
#include "support/irregular_graph.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using namespace std::chrono_literals;
using optim::start;
using torch::optim::SGD;

constexpr std::int64_t small_bucket = 300;  // several, none of them a round number of elements
/// As `train_by_forward`, with torch's optimizer, and neighbor_allreduce of all parameters before
/// or after it.
template <class Comm, class Links>
void train_by_hand(Comm& comm, mlp& net, SGD& sgd, int step, const Links& links, sequence what) {
  const auto combine = [&] {
    const torch::NoGradGuard no_grad;
    torch::nn::utils::vector_to_parameters(neighbor_allreduce(comm, flatten(*net), links),
                                           net->parameters());
  };
  sgd.zero_grad();
  loss_in_step(step)(net, comm.rank()).backward();
  if (what == sequence::combine_first) combine();
  sgd.step();
  if (what == sequence::adapt_first) combine();
}

template <class Comm, class Wrap, class Links>
void require_as_by_hand(Comm& comm, at::ScalarType type, sequence what, const Links& links,
                        const Wrap& wrap) {
  const auto momentum = torch::optim::SGDOptions(0.1).momentum(0.9);
  mlp net = make_mlp(comm.rank(), type), twin = make_mlp(comm.rank(), type);
  auto optimizer = wrap(SGD(net->parameters(), momentum), net);
  SGD sgd(twin->parameters(), momentum);
  for (int step = 0; step < 3; ++step) {
    train_by_forward(optimizer, net, comm.rank(), step);
    train_by_hand(comm, twin, sgd, step, links, what);
    require_same_parameters(*net, *twin);
  }
}

/// \param prepare  called with each new optimizer.
template <class Comm, class Graph, class Links, class Prepare>
void require_both_as_by_hand(Comm& comm, const Graph& graph, const Links& links, Prepare prepare) {
  for (const auto type : {at::kFloat, at::kDouble}) {
    for (const start when : all_starts)
      require_as_by_hand(comm, type, sequence::combine_first, links, [&](SGD sgd, mlp& net) {
        optim::adapt_with_combine optimizer(std::move(sgd), net, comm, graph,
                                            {.start = when, .bucket_bytes = small_bucket});
        prepare(optimizer);
        return optimizer;
      });
    require_as_by_hand(comm, type, sequence::adapt_first, links, [&](SGD sgd, mlp& net) {
      optim::adapt_then_combine optimizer(std::move(sgd), net, comm, graph,
                                          {.bucket_bytes = small_bucket});
      prepare(optimizer);
      return optimizer;
    });
  }
}

}  // namespace

RANKS_TEST("averages with several neighbours are those of neighbor_allreduce, bit for bit",
           "[optim][several]") {
  const int n = comm.size();
  const auto as_it_is = [](auto&) {};
  if (n == 4 || n == 8)
    require_both_as_by_hand(comm, topology::exponential(n), topology::exponential(n), as_it_is);
  if (n == 3 || n == 5)
    require_both_as_by_hand(comm, topology::fully_connected(n), topology::fully_connected(n),
                            as_it_is);
  const neighborhood links = irregular_graph(comm.rank(), n);
  if (n == 3 || n == 4)
    require_both_as_by_hand(comm, topology::ring(n), links, [&](auto& optimizer) {
      optimizer.on_round([links](std::int64_t) { return links; });
    });
}

// A sum of as many terms as there are neighbours is made piece by piece, so that it takes no more
// memory than the sum itself.
RANKS_TEST("a long parameter travels in pieces where ranks have several neighbours, else whole",
           "[optim][several]") {
  constexpr std::int64_t count = 300'007;  // 2.3 MiB
  const auto steps = [&](const auto& topology, std::int64_t messages) {
    torch::nn::Module net;
    const at::Tensor slope = torch::linspace(comm.rank(), 1, count, at::kDouble);
    const at::Tensor weights =
        net.register_parameter("weights", slope.cos().div(comm.rank() + 3).clone());
    at::Tensor expected = weights.detach().clone();
    optim::adapt_with_combine optimizer(SGD(net.parameters(), 0.1), net, comm, topology);
    for (int step = 0; step < 3; ++step) {
      const auto before = comm.statistics().messages_sent;
      optimizer.zero_grad();
      weights.dot(slope).backward();
      optimizer.step();
      require_equal(comm.statistics().messages_sent - before, messages);
      if constexpr (topology::graph<std::remove_cvref_t<decltype(topology)>>)
        expected = neighbor_allreduce(comm, expected, topology);
      else
        expected = neighbor_allreduce(comm, expected, topology.rounds(comm.rank())[step]);
      expected.add_(slope, -0.1);
      require(torch::equal(weights, expected), "other parameters");
    }
  };
  const int n = comm.size();
  const auto degree = [&](const auto& graph) {
    return static_cast<std::int64_t>(std::ranges::size(graph.out_neighbors(comm.rank())));
  };
  steps(topology::exponential(n), degree(topology::exponential(n)) * (n > 2 ? 3 : 1));
  // Also those of which somebody else has several.
  steps(topology::star(n), degree(topology::star(n)) * (n > 2 ? 3 : 1));
  steps(topology::one_peer_exponential(n), n > 1 ? 1 : 0);
}

RANKS_TEST("a rank that withdraws from several neighbours leaves all parameters as they were",
           "[optim][several]") {
  const int n = comm.size();
  if (n == 1) return;
  mlp net = make_mlp(comm.rank());
  optim::adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                                      topology::fully_connected(n), {.bucket_bytes = small_bucket});
  train_by_forward(optimizer, net, comm.rank(), 0);
  if (comm.rank() == n - 1) net->second->bias.requires_grad_(false);
  const auto before = flatten(*net);
  const auto text =
      require_throws<mismatch_error>([&] { train_by_forward(optimizer, net, comm.rank(), 1); });
  require_contains(text, "\"second.bias\"");
  require_same(flatten(*net), before);
}

TEST_CASE("a message lost among several neighbours leaves all parameters as they were",
          "[optim][several][thread]") {
  using faulty = faulty_backend<thread_backend>;
  constexpr int size = 4;
  const log_capture quiet;
  std::atomic<int> failed = 0, completed = 0;
  for (std::uint64_t seed = 0; seed < 40 && (seed < 8 || failed == 0 || completed == 0); ++seed) {
    const auto failures = run_wrapped(
        size,
        [&](thread_backend inner) {
          return faulty(std::move(inner), {.seed = seed, .delay = 3, .drop = 0.02, .drop_from = 4});
        },
        [&](communicator<faulty>& comm) {
          mlp net = make_mlp(comm.rank());
          const auto before = flatten(*net);
          try {
            optim::adapt_with_combine optimizer(SGD(net->parameters(), 0.0), net, comm,
                                                topology::fully_connected(size),
                                                {.bucket_bytes = small_bucket});
            train_by_forward(optimizer, net, comm.rank(), 0);
          } catch (const error&) {
            ++failed;
            return require_same(flatten(*net), before);
          }
          ++completed;
          std::vector<mlp> all;
          for (int rank = 0; rank < size; ++rank) all.push_back(make_mlp(rank));
          average_over_all(all);
          require_close(flatten(*net), flatten(*all[0]), 1e-12);
        },
        {.timeout = 1s, .stall_warning = 100ms});
    INFO("seed " << seed);
    REQUIRE(first_text(failures) == "");
  }
  CHECK(completed > 0);
  CHECK(failed > 0);
}
