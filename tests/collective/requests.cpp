// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <bluefog/collective.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

template <class In>
concept starts = requires(communicator<thread_backend>& comm, In&& in, std::vector<float>& out) {
  allreduce_nonblocking(comm, std::forward<In>(in), out);
  allgather_nonblocking(comm, std::forward<In>(in));
};

}  // namespace

TEST_CASE("a temporary array cannot be given to an operation that goes on after the call",
          "[collective][request]") {
  STATIC_REQUIRE(starts<std::vector<float>&>);
  STATIC_REQUIRE(starts<const std::vector<float>&>);
  STATIC_REQUIRE(starts<std::span<const float>>);
  STATIC_REQUIRE_FALSE(starts<std::vector<float>>);
}

RANKS_TEST("many operations of all kinds are in flight in program order",
           "[collective][request][broadcast_object]") {
  constexpr std::size_t rounds = 15;
  std::vector<std::vector<double>> sums(rounds), copies(rounds);
  std::vector<std::vector<int>> own(rounds);
  std::vector<request<void>> requests;
  std::vector<request<std::vector<int>>> gathered;
  std::vector<request<std::string>> objects;
  for (std::size_t i = 0; i < rounds; ++i) {
    const std::size_t count = i % 4 == 0 ? 6000 : 10 + i;
    sums[i].assign(count, comm.rank() + static_cast<double>(i));
    copies[i].assign(count, comm.rank());
    requests.push_back(allreduce_nonblocking(comm, sums[i], sums[i], reduce_op::sum));
    requests.push_back(broadcast_nonblocking(comm, copies[i], static_cast<int>(i) % comm.size()));
    own[i].assign(i, comm.rank());
    gathered.push_back(allgather_nonblocking(comm, own[i]));
    requests.push_back(barrier_nonblocking(comm));
    objects.push_back(broadcast_object_nonblocking(comm, std::string(i, 'a'), 0));
  }
  const auto n = comm.size();
  for (std::size_t i = rounds; i-- > 0;) {  // waited for in another order
    require_equal(objects[i].wait(), std::string(i, 'a'));
    require_equal(gathered[i].wait().size(), i * static_cast<std::size_t>(n));
  }
  for (auto& each : requests) each.wait();
  for (std::size_t i = 0; i < rounds; ++i) {
    for (const double each : sums[i])
      require_near(each, n * (n - 1) / 2.0 + n * static_cast<double>(i), 1e-9);
    for (const double each : copies[i]) require_equal(each, static_cast<int>(i) % n);
  }
}

RANKS_TEST("a request that is dropped is waited for", "[collective][request]") {
  std::vector<float> x(5000, 1.0F);
  { const auto dropped = allreduce_nonblocking(comm, x, x, reduce_op::sum); }
  for (const float each : x) require_equal(each, static_cast<float>(comm.size()));
}

RANKS_TEST("a request hands its value over once", "[collective][request]") {
  const std::vector<int> own{comm.rank()};
  auto once = allgather_nonblocking(comm, own);
  require_equal(once.wait().size(), static_cast<std::size_t>(comm.size()));
  require_throws<usage_error>([&] { once.wait(); });
}

RANKS_TEST("a name in use is refused on every rank until somebody has waited for it",
           "[collective][request]") {
  for (int round = 0; round < 20; ++round) {
    std::vector<float> x(10, 1.0F), y(10, 1.0F);
    auto first = allreduce_nonblocking(comm, x, x, reduce_op::sum, {.name = "loss"});
    const auto text = require_throws<usage_error>(
        [&] { allreduce_nonblocking(comm, y, y, reduce_op::sum, {.name = "loss"}).wait(); });
    require_contains(text, "allreduce: the name \"loss\" is in use");
    require_throws<usage_error>([&] { barrier(comm, {.name = "loss"}); });
    allreduce(comm, y, y, reduce_op::sum, {.name = "accuracy"});
    first.wait();
    allreduce(comm, y, y, reduce_op::max, {.name = "loss"});
    require_equal(x[9], static_cast<float>(comm.size()));
    require_equal(y[9], static_cast<float>(comm.size()));
  }
}

RANKS_TEST("one rank alone computes what it would compute by itself",
           "[collective][request][broadcast_object]") {
  if (comm.size() > 1) return;
  std::vector<float> x{1, 2, 3}, y(3);
  for (const auto op :
       {reduce_op::average, reduce_op::sum, reduce_op::min, reduce_op::max, reduce_op::product}) {
    allreduce(comm, x, y, op);
    require_equal(y, x);
  }
  broadcast(comm, y, 0);
  require_equal(allgather(comm, x), x);
  require_equal(broadcast_object(comm, std::string("alone"), 0), std::string("alone"));
  barrier(comm);
  require_equal(comm.statistics().bytes_sent, 0);
  require_equal(comm.statistics().messages_sent, 0);
}
