// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/context.hpp>
#include <bluefog/backend/job.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog {

/// What check mode compares before an operation starts.
struct call_description {
  std::string_view operation;  ///< the public function; static storage
  std::string name = {};       ///< the user's name for this call, may be empty
  std::string agreement = {};  ///< everything that has to be equal on all ranks; made in check mode
  /// Neighbour operations: whom this rank sends to and receives from.
  std::optional<neighborhood> links = {};
  /// Neighbour averages: stands for the weights of the graph that every rank gives, in check mode;
  /// 0 if this rank gives links of its own.
  std::uint64_t graph = 0;
  /// Operations of two ranks: the other one.
  std::optional<int> peer = {};
};

namespace detail {

/// The fingerprint of one rank's call, as it travels to one other rank.
struct fingerprint {
  std::uint64_t hash = 0;
  std::uint64_t graph = 0;
  std::int32_t sends = 0;     // whether the sender sends to the receiver of this fingerprint
  std::int32_t receives = 0;  // whether it expects something from it
  std::array<char, 240> text{};

  [[nodiscard]] std::string_view view() const { return text.data(); }
  void write(std::string_view words) {
    const auto length = std::min(words.size(), text.size() - 1);
    std::ranges::copy(words.substr(0, length), text.begin());
  }
};

[[nodiscard]] inline bool contains(const edges& list, int rank) {
  return std::ranges::any_of(list, [&](const edge& each) { return each.rank == rank; });
}

template <class T>
[[nodiscard]] mutable_buffer bytes_of(T& value) noexcept {
  return {reinterpret_cast<std::byte*>(&value), sizeof(T), dtype::uint8};
}

/// \return "rank 0 calls ...; ranks 1, 2 call ..." if the calls differ.
[[nodiscard]] inline std::string disagreement(std::span<const fingerprint> calls, int rank,
                                              std::span<const int> ranks) {
  const auto& own = calls[static_cast<std::size_t>(rank)];
  if (std::ranges::all_of(ranks, [&](int other) {
        return calls[static_cast<std::size_t>(other)].hash == own.hash;
      }))
    return {};
  std::string text;
  std::vector<int> told;
  for (const int first : ranks) {
    const auto& call = calls[static_cast<std::size_t>(first)];
    if (std::ranges::find(told, first) != told.end()) continue;
    std::vector<int> same;
    std::ranges::copy_if(ranks, std::back_inserter(same), [&](int other) {
      return calls[static_cast<std::size_t>(other)].hash == call.hash;
    });
    told.insert(told.end(), same.begin(), same.end());
    text += concat(text.empty() ? "" : "; ", ranks_text(same),
                   same.size() == 1 ? " calls " : " call ", call.view());
  }
  return text;
}

/// \return who gives another graph than the first that gives any; links of its own a rank may have.
[[nodiscard]] inline std::string different_graphs(std::span<const fingerprint> calls) {
  const auto given = [](const fingerprint& call) { return call.graph != 0; };
  const auto first = std::ranges::find_if(calls, given);
  if (first == calls.end()) return {};
  const auto other = std::ranges::find_if(
      calls, [&](const fingerprint& call) { return given(call) && call.graph != first->graph; });
  if (other == calls.end()) return {};
  return concat("the graph of rank ", other - calls.begin(),
                " has other weights than that of rank ", first - calls.begin());
}

/// Sends a value to every other rank of `ranks` and receives theirs.
template <backend Backend, class T>
task exchange_with(operation_context<Backend> context, std::vector<int> ranks,
                   std::vector<T>* values, std::function<T(int)> own) {
  std::vector<T> outgoing;
  outgoing.reserve(ranks.size());
  auto exchange = context.exchange(traffic_kind::control);
  for (const int peer : ranks) {
    if (peer == context.rank()) continue;
    exchange.receive(bytes_of((*values)[static_cast<std::size_t>(peer)]), peer);
    outgoing.push_back(own(peer));
    exchange.send(bytes_of(outgoing.back()), peer);
  }
  auto transfer = std::move(exchange).submit();
  co_await transfer;
}

}  // namespace detail

/// Compares the call with that of every rank in `ranks`, and sends with receives.
///
/// Throws the same `mismatch_error` on all of them if there is a difference. It also names the
/// operations of all ranks that were agreed on last, which shows where the ranks parted.
template <backend Backend>
task verify(operation_context<Backend> context, call_description call, std::vector<int> ranks) {
  using detail::contains;
  using detail::fingerprint;
  const int self = context.rank();
  const auto size = static_cast<std::size_t>(context.size());
  const std::string words =
      concat(call.operation, call.name.empty() ? "" : " \"" + call.name + "\"", call.agreement);

  fingerprint own;
  own.hash = std::hash<std::string>{}(words);
  own.graph = call.graph;
  own.write(words);
  std::vector<fingerprint> calls(size);
  calls[static_cast<std::size_t>(self)] = own;
  std::function<fingerprint(int)> addressed = [&](int peer) {
    fingerprint copy = own;
    copy.sends = call.links && contains(call.links->destinations, peer) ? 1 : 0;
    copy.receives = call.links && contains(call.links->sources, peer) ? 1 : 0;
    return copy;
  };
  co_await detail::exchange_with(context, ranks, &calls, addressed);

  const std::string where =
      concat(call.operation, ": ranks disagree in operation ", context.number(), ": ");
  const std::string before = context.collective() ? context.agreed().text() : "";
  if (auto text = detail::disagreement(calls, self, ranks); !text.empty())
    throw mismatch_error(where + text + before);
  if (auto text = detail::different_graphs(calls); !text.empty())
    throw mismatch_error(where + text + before);
  if (context.collective()) context.agreed().add(own.view());
  if (!call.links) co_return;

  // Only the two ends of an edge see that it does not fit, so all tell all what they saw.
  fingerprint verdict;
  for (const int peer : ranks) {
    if (peer == self) continue;
    const auto& theirs = calls[static_cast<std::size_t>(peer)];
    const bool expected = contains(call.links->sources, peer);
    if ((theirs.sends == 1) != expected)
      verdict.write(
          theirs.sends == 1
              ? concat("rank ", peer, " sends to rank ", self, ", which does not receive from it")
              : concat("rank ", self, " receives from rank ", peer, ", which does not send to it"));
  }
  std::vector<fingerprint> verdicts(size);
  verdicts[static_cast<std::size_t>(self)] = verdict;
  std::function<fingerprint(int)> same = [&](int) { return verdict; };
  co_await detail::exchange_with(context, ranks, &verdicts, same);
  for (const auto& each : verdicts)
    if (!each.view().empty()) throw mismatch_error(where + std::string(each.view()) + before);
}

/// Runs `work` after the call has been compared.
///
/// Operations of all ranks are compared one after the other, so that `work` finds the order in
/// which they were called. Those of two ranks have no such order, and must not wait for each other.
template <backend Backend>
task checked(operation_context<Backend> context, call_description call, std::vector<int> ranks,
             task work) {
  const bool ordered = !call.peer;
  if (ordered) co_await detail::order::hold;
  co_await verify(context, std::move(call), std::move(ranks));
  if (ordered) co_await detail::order::release;
  co_await std::move(work);
}

}  // namespace bluefog
