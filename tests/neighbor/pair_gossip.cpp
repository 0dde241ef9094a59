// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <vector>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/collective/barrier.hpp>
#include <bluefog/neighbor/pair_gossip.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

RANKS_TEST("two ranks average while the others do something else", "[neighbor][pair_gossip]") {
  const int peer = comm.rank() ^ 1;
  for (const std::size_t count : {0U, 1U, 5000U}) {
    std::vector<float> x(count, static_cast<float>(comm.rank())), y(count);
    if (peer < comm.size()) {
      pair_gossip(comm, x, y, peer);
      for (const float each : x) require_equal(each, static_cast<float>(comm.rank()));
      for (const float each : y) require_equal(each, static_cast<float>(comm.rank() + peer) / 2);
      pair_gossip_nonblocking(comm, x, y, peer, 2.0, 0.25).wait();
      for (const float each : x) require_equal(each, static_cast<float>(comm.rank()));
      for (const float each : y)
        require_equal(each, 2 * static_cast<float>(comm.rank()) + 0.25F * static_cast<float>(peer));
      pair_gossip(comm, x, x, peer, 0.25, 2.0);
      for (const float each : x)
        require_equal(each, 0.25F * static_cast<float>(comm.rank()) + 2 * static_cast<float>(peer));
    }
  }
  barrier(comm);
}

RANKS_TEST("pairs count for themselves, so that they may gossip unequally often",
           "[neighbor][pair_gossip][unordered]") {
  const int n = comm.size();
  if (n < 3) return;
  // Rank 0 meets rank r r times, in flight between operations of all ranks.
  std::vector<std::vector<double>> x(64, std::vector<double>(5, comm.rank()));
  std::vector<request<void>> requests;
  std::size_t used = 0;
  const auto meet = [&](int peer, int times) {
    for (int k = 0; k < times; ++k, ++used)
      requests.push_back(pair_gossip_nonblocking(comm, x[used], x[used], peer, 1.0, k + 1.0));
  };
  std::vector<double> sum(5, 1.0);
  if (comm.rank() == 0)
    for (int peer = n - 1; peer > 0; --peer) meet(peer, peer);
  allreduce(comm, sum, sum, reduce_op::sum);
  if (comm.rank() > 0) meet(0, comm.rank());
  for (auto& each : requests) each.wait();
  require_equal(sum[0], static_cast<double>(n));
  used = 0;
  for (int peer = n - 1; peer > 0; --peer) {
    const int other = comm.rank() == 0 ? peer : 0;
    if (comm.rank() != 0 && comm.rank() != peer) continue;
    for (int k = 0; k < peer; ++k, ++used)
      require_near(x[used][4], comm.rank() + (k + 1.0) * other, 1e-12);
  }
}

RANKS_TEST("pair_gossip counts one message of its bytes", "[neighbor][pair_gossip]") {
  const int peer = comm.rank() ^ 1;
  if (peer >= comm.size()) return;
  std::vector<double> x(10);
  const auto traffic = traffic_of(comm, [&] { pair_gossip(comm, x, x, peer); });
  require_equal(traffic.bytes_sent, 80);
  require_equal(traffic.messages_sent, 1);
  require_equal(traffic.operations, 1);
}

RANKS_TEST("pair_gossip refuses oneself, ranks that do not exist, and bad weights",
           "[neighbor][pair_gossip]") {
  std::vector<float> x(2), three(3);
  std::vector<int> integers(2);
  auto text = require_throws<usage_error>([&] { pair_gossip(comm, x, x, comm.rank()); });
  require_contains(text, "pair_gossip: the peer must be another rank");
  text = require_throws<usage_error>([&] { pair_gossip(comm, x, x, comm.size()); });
  require_contains(text, "pair_gossip: peer must be in [0, ");
  const int peer = (comm.rank() + 1) % comm.size();
  require_throws<usage_error>([&] { pair_gossip(comm, x, three, peer); });
  require_throws<usage_error>([&] { pair_gossip(comm, integers, integers, peer); });
  if (comm.size() > 1)
    require_throws<usage_error>(
        [&] { pair_gossip(comm, x, x, peer, std::numeric_limits<double>::infinity()); });
}
