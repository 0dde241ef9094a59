// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include <bluefog/collective.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/topology/ring.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

/// Requires that every rank throws an error that holds both texts, and that the ranks then go on.
template <class Comm, class Act>
void disagree(Comm& comm, const std::string& one, const std::string& other, Act act) {
  const auto text = require_throws<mismatch_error>(act);
  require_contains(text, one);
  require_contains(text, other);
  require_contains(text, "rank 1 calls");
  std::vector<int> ones(3, 1);
  allreduce(comm, ones, ones, reduce_op::sum);
  require_equal(ones.front(), comm.size());
}

}  // namespace

RANKS_TEST("check mode tells every rank what the others called", "[collective][check]") {
  if (comm.size() == 1) return;
  auto checked = with_options(comm, {.check = true});
  const bool odd = comm.rank() == 1;
  std::vector<float> x(odd ? 5 : 10, 1.0F);
  std::vector<double> y(10, 1.0);

  disagree(checked, "allreduce float32 [10] sum", "allreduce float32 [5] sum",
           [&] { allreduce(checked, x, x, reduce_op::sum); });
  disagree(checked, "broadcast float32 [10]", "broadcast float32 [5]",
           [&] { broadcast(checked, x, 0); });
  disagree(checked, "from rank 0", "from rank 1", [&] { broadcast(checked, y, odd ? 1 : 0); });
  disagree(checked, "float64 [10] sum", "float64 [10] max",
           [&] { allreduce(checked, y, y, odd ? reduce_op::max : reduce_op::sum); });
  disagree(checked, "\"a\"", "\"b\"", [&] { barrier(checked, {.name = odd ? "b" : "a"}); });
  disagree(checked, "rank 1 calls allreduce float64",
           checked.size() > 2 ? "call barrier" : "calls barrier", [&] {
             if (odd)
               allreduce(checked, y, y, reduce_op::sum);
             else
               barrier(checked);
           });
  disagree(checked, "allgather float32 [any]", "allgather float64 [any]", [&] {
    if (odd)
      static_cast<void>(allgather(checked, x));
    else
      static_cast<void>(allgather(checked, y));
  });
  disagree(checked, "broadcast_object of type i", "broadcast_object of type d", [&] {
    if (odd)
      static_cast<void>(broadcast_object(checked, 1, 0));
    else
      static_cast<void>(broadcast_object(checked, 1.0, 0));
  });
  disagree(checked, "float64 [10] sum", "within machines", [&] {
    allreduce(checked, y, y, reduce_op::sum, {.scope = odd ? scope::machine : scope::all});
  });
  require_equal(y, std::vector<double>(10, 1.0));  // a refused operation changes nothing
}

RANKS_TEST("check mode names the last calls that ranks agreed on", "[collective][check]") {
  if (comm.size() == 1) return;
  auto checked = with_options(comm, {.check = true});
  std::vector<int> x(10, 1);
  for (const auto op : {reduce_op::max, reduce_op::min, reduce_op::max})
    allreduce(checked, x, x, op, {.name = "early"});
  barrier(checked);
  allreduce(checked, x, x, reduce_op::min);
  broadcast(checked, x, 0);
  const auto text =
      require_throws<mismatch_error>([&] { broadcast(checked, x, comm.rank() == 1 ? 1 : 0); });
  require_contains(text, "in operation 7: ");
  const auto listed = text.find(
      "; before it: allreduce \"early\" int32 [10] max, barrier, "
      "allreduce int32 [10] min, broadcast int32 [10] from rank 0");
  require(listed != std::string::npos && text.find("; before it: ") == listed, text);
}

RANKS_TEST("check mode finds the operation that does not fit among many in flight",
           "[collective][check]") {
  if (comm.size() == 1) return;
  auto checked = with_options(comm, {.check = true});
  std::vector<std::vector<float>> x(8, std::vector<float>(4, 1.0F));
  x[3].resize(comm.rank() == 1 ? 5 : 6);
  std::vector<request<void>> requests;
  for (auto& each : x)
    requests.push_back(allreduce_nonblocking(checked, each, each, reduce_op::sum));
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (i == 3)
      require_contains(require_throws<mismatch_error>([&] { requests[i].wait(); }), "[5]");
    else
      requests[i].wait();
    if (i != 3) require_equal(x[i][0], static_cast<float>(comm.size()));
  }
}

RANKS_TEST("what check mode sends is no payload", "[collective][check]") {
  auto checked = with_options(comm, {.check = true});
  auto unchecked = with_options(comm, {.check = false});
  const topology::ring graph(comm.size());
  std::vector<float> x(1000, 1.0F);
  const auto costs = [&](auto act) {
    const auto plain = traffic_of(unchecked, [&] { act(unchecked); });
    const auto both = traffic_of(checked, [&] { act(checked); });
    require_equal(both.bytes_sent, plain.bytes_sent);
    require_equal(both.messages_sent, plain.messages_sent);
    require_equal(both.operations, plain.operations);
    require(comm.size() == 1 || plain.bytes_sent > 0, "it sends nothing");
    const auto more_messages = both.control_messages - plain.control_messages;
    const auto more_bytes = both.control_bytes - plain.control_bytes;
    if (comm.size() == 1) {
      require_equal(more_messages, 0);
      require_equal(more_bytes, 0);
    } else {
      // At least one message to every other rank.
      require(more_messages >= comm.size() - 1, "nothing was compared");
      require(more_bytes >= more_messages, "messages without anything in them");
    }
  };
  costs([&](auto& over) { allreduce(over, x, x); });
  costs([&](auto& over) { neighbor_allreduce(over, x, x, graph); });
}

RANKS_TEST("without check mode a message of another length is still never data",
           "[collective][check][stray]") {
  if (comm.size() != 2) return;
  std::vector<bfloat16> x(comm.rank() == 1 ? 5 : 10);  // a type that goes by messages everywhere
  const auto text = require_throws<mismatch_error>([&] { allreduce(comm, x, x); });
  require_contains(text, concat("rank ", 1 - comm.rank(), " sent"));
  barrier(comm);
}
