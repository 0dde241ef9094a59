// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <bluefog/backend/options.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/thread/backend.hpp>
#include <bluefog/thread/fabric.hpp>

namespace bluefog {

/// Runs `body` once per rank, each in a thread of its own, and returns when all have ended.
///
/// A rank that leaves `body`, by return or exception, is gone for the others: an operation that
/// needs it fails there with a `peer_error`.
///
/// \param size     the number of ranks, at least 1.
/// \param body     called with this rank's `communicator<thread_backend>&`, from `size` threads.
/// \param options  of the communicators.
/// \throws usage_error if `size < 1`; else what a rank threw: the lowest rank's exception that is
///         not a `peer_error`, since those tell of another rank's end.
template <std::invocable<communicator<thread_backend>&> Body>
void run_threads(int size, Body&& body, const communicator_options& options = {}) {
  expects(size >= 1, "run_threads: the number of ranks must be at least 1, got ", size);
  options.validate();
  const auto group = std::make_shared<threads::fabric>(size);
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(size));
  const auto run_rank = [&](int rank) {
    try {
      communicator<thread_backend> comm(thread_backend(group, rank), options);
      body(comm);
    } catch (...) {
      failures[static_cast<std::size_t>(rank)] = std::current_exception();
    }
    group->leave(rank);
  };
  {
    std::vector<std::jthread> ranks;
    ranks.reserve(failures.size());
    try {
      for (int rank = 0; rank < size; ++rank) ranks.emplace_back(run_rank, rank);
    } catch (...) {  // no more threads: those that run must not wait for the others
      for (auto rank = static_cast<int>(ranks.size()); rank < size; ++rank) group->leave(rank);
      throw;
    }
  }
  const auto cause = [](const std::exception_ptr& failure) {
    if (!failure) return false;
    try {
      std::rethrow_exception(failure);
    } catch (const peer_error&) {
      return false;
    } catch (...) {
      return true;
    }
  };
  auto first = std::ranges::find_if(failures, cause);
  if (first == failures.end())
    first = std::ranges::find_if(failures, [](const auto& failure) { return failure != nullptr; });
  if (first != failures.end()) std::rethrow_exception(*first);
}

}  // namespace bluefog
