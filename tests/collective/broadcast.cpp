// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <vector>

#include <bluefog/collective/broadcast.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

template <class T>
values<T> operand(int rank, std::size_t count) {
  return values<T>(count, [&](std::size_t i) {
    if constexpr (std::is_same_v<T, bool>)
      return sample(rank, i) % 2 == 0;
    else if constexpr (std::is_integral_v<T>)
      return sample(rank, i);
    else
      return static_cast<float>(sample(rank, i));
  });
}

}  // namespace

RANKS_TEST("broadcast gives every rank the root's values, for every dtype, root and length",
           "[collective][broadcast]") {
  for (const dtype type : dtypes)
    with_type(type, [&]<class T>() {
      for (int root = 0; root < comm.size(); ++root) {
        // Of many ranks, a third are roots with each type; the types take turns.
        if (comm.size() > 5 && (root + static_cast<int>(type)) % 3 != 0) continue;
        for (const std::size_t count : sizes) {
          const auto wanted = operand<T>(root, count);
          auto in = operand<T>(comm.rank(), count);
          values<T> out(count);
          broadcast(comm, in, out, root);
          require(std::equal(out.begin(), out.end(), wanted.begin()), "out of place");
          const auto untouched = operand<T>(comm.rank(), count);
          require(std::equal(in.begin(), in.end(), untouched.begin()), "the input has changed");
          broadcast(comm, in, root);
          require(std::equal(in.begin(), in.end(), wanted.begin()), "in place");
        }
      }
    });
}

RANKS_TEST("broadcasts in flight keep to their own data", "[collective][broadcast]") {
  std::vector<std::vector<int>> x(20);
  std::vector<request<void>> requests;
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i].assign(i % 3 == 0 ? 20000 : 5, comm.rank() * 100 + static_cast<int>(i));
    const int root = static_cast<int>(i) % comm.size();
    requests.push_back(broadcast_nonblocking(comm, x[i], root));
  }
  for (auto& each : requests) each.wait();
  for (std::size_t i = 0; i < x.size(); ++i)
    for (const int each : x[i])
      require_equal(each, static_cast<int>(i) % comm.size() * 100 + static_cast<int>(i));
}

RANKS_TEST("a broadcast that is started reads one array and writes another",
           "[collective][broadcast]") {
  std::vector<std::vector<int>> in, out;
  for (int root = 0; root < comm.size(); ++root) {
    in.emplace_back(root % 2 == 0 ? 20000 : 5, 100 * comm.rank() + root);
    out.emplace_back(in.back().size(), -1);
  }
  std::vector<request<void>> requests;
  for (int root = 0; root < comm.size(); ++root) {
    const auto place = static_cast<std::size_t>(root);
    requests.push_back(broadcast_nonblocking(comm, in[place], out[place], root));
  }
  for (int root = comm.size() - 1; root >= 0; --root) {
    const auto place = static_cast<std::size_t>(root);
    requests[place].wait();
    for (const int each : in[place]) require_equal(each, 100 * comm.rank() + root);
    for (const int each : out[place]) require_equal(each, 101 * root);
  }
}

RANKS_TEST("broadcast refuses a root that does not exist, and arrays that differ",
           "[collective][broadcast]") {
  std::vector<float> x(3), y(4);
  const auto traffic = traffic_of(comm, [&] {
    for (const int root : {-1, comm.size()}) {
      const auto text = require_throws<usage_error>([&] { broadcast(comm, x, root); });
      require_contains(text,
                       concat("broadcast: root must be in [0, ", comm.size(), "), got ", root));
    }
    require_throws<usage_error>([&] { broadcast(comm, x, y, 0); });
  });
  require_equal(traffic.operations, 0);
  broadcast(comm, x, 0);
}

RANKS_TEST("a broadcast counts (n-1)/n of its bytes as one message", "[collective][broadcast]") {
  std::vector<double> x(5000);
  const auto traffic = traffic_of(comm, [&] { broadcast(comm, x, comm.size() - 1); });
  const auto n = std::int64_t{comm.size()};
  require_equal(traffic.bytes_sent, (n - 1) * 40000 / n);
  require_equal(traffic.messages_sent, n > 1 ? 1 : 0);
}
