// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <source_location>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/communicator.hpp>
#include <bluefog/thread.hpp>
#if __has_include(<mpi.h>) && defined(BLUEFOG_TEST_MPI)
#include <bluefog/mpi.hpp>
#endif

#include "catch.hpp"

/// Tests that run on several ranks: one body for threads of this process and for MPI processes.
///
/// Catch's assertions must not run in several threads at once, so ranks report by throwing.
namespace bluefog_test {

/// A rank saw something else than it had to.
class rank_failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail_here(const std::string& what, const std::source_location& where) {
  std::ostringstream text;
  text << where.file_name() << ":" << where.line() << ": " << what;
  throw rank_failure(text.str());
}

inline void require(bool holds, std::string_view what = "does not hold",
                    std::source_location where = std::source_location::current()) {
  if (!holds) fail_here(std::string(what), where);
}

template <class Got, class Wanted>
void require_equal(const Got& got, const Wanted& wanted,
                   std::source_location where = std::source_location::current()) {
  if (got == wanted) return;
  std::ostringstream text;
  if constexpr (requires { text << got << wanted; })
    text << "got " << got << ", wanted " << wanted;
  else
    text << "values differ";
  fail_here(text.str(), where);
}

inline void require_near(double got, double wanted, double tolerance,
                         std::source_location where = std::source_location::current()) {
  if (std::abs(got - wanted) <= tolerance) return;
  std::ostringstream text;
  text.precision(17);
  text << "got " << got << ", wanted " << wanted << " within " << tolerance;
  fail_here(text.str(), where);
}

/// \return the message of the `Error` that `act` throws.
template <std::derived_from<std::exception> Error, std::invocable Act>
std::string require_throws(Act&& act,
                           std::source_location where = std::source_location::current()) {
  try {
    act();
  } catch (const Error& thrown) {
    return thrown.what();
  } catch (const std::exception& other) {
    fail_here(std::string("another exception: ") + other.what(), where);
  }
  fail_here("nothing was thrown", where);
}

/// \return the text of the `Error` that `act` throws on this rank, without waiting for a time-out.
template <std::derived_from<std::exception> Error, std::invocable Act>
std::string require_throws_soon(Act&& act,
                                std::source_location where = std::source_location::current()) {
  const auto start = std::chrono::steady_clock::now();
  auto text = require_throws<Error>(std::forward<Act>(act), where);
  require(std::chrono::steady_clock::now() - start < std::chrono::seconds(2), "too late", where);
  return text;
}

inline void require_contains(std::string_view text, std::string_view part,
                             std::source_location where = std::source_location::current()) {
  if (text.find(part) == std::string_view::npos)
    fail_here("\"" + std::string(text) + "\" does not contain \"" + std::string(part) + "\"",
              where);
}

/// \return a communicator of the same ranks that behaves as `options` say.
template <class Comm>
[[nodiscard]] Comm with_options(Comm& comm, const bluefog::communicator_options& options) {
  static thread_local std::uint64_t serial = 1000;  // counts alike on every rank
  std::vector<int> members(static_cast<std::size_t>(comm.size()));
  std::iota(members.begin(), members.end(), 0);
  return Comm(comm.transport().subset(members, serial++), options);
}

/// Runs `body(comm)` on 1 to 8 thread ranks; with libtorch, whose tests take long, not on 6 and 7.
template <class Body>
void on_threads(const Body& body, const bluefog::communicator_options& options = {}) {
#ifdef BLUEFOG_HAS_TORCH
  constexpr std::array counts{1, 2, 3, 4, 5, 8};
#else
  constexpr std::array counts{1, 2, 3, 4, 5, 6, 7, 8};
#endif
  for (const int ranks : counts) {
    INFO("on " << ranks << " thread ranks");
    std::string failure;
    try {
      bluefog::run_threads(ranks, body, options);
    } catch (const std::exception& problem) {
      failure = problem.what();
    }
    CHECK(failure == "");
  }
}

#if __has_include(<mpi.h>) && defined(BLUEFOG_TEST_MPI)
/// Runs `body(comm)` on the ranks of mpirun.
template <class Body>
void on_mpi(const Body& body, const bluefog::communicator_options& options = {}) {
  std::string failure;
  {
    bluefog::communicator<bluefog::mpi_backend> comm(options);
    try {
      body(comm);
    } catch (const std::exception& problem) {
      failure = problem.what();
    }
  }
  CHECK(failure == "");
}
#endif

}  // namespace bluefog_test

#ifdef BLUEFOG_TEST_NCCL
#include "nccl_ranks.hpp"
#endif

// RANKS_TEST("sentence", "[layer][topic]") { ... comm ... }
//
// Defines two test cases with one body, in which `comm` is a communicator: one over threads, tagged
// [thread], and one over MPI, tagged [mpi]. In the tests of the NCCL backend, which compile the
// same files, it defines one instead, over a stand-in for NCCL, tagged [nccl].
#define BLUEFOG_TEST_JOIN_(a, b) a##b
#define BLUEFOG_TEST_JOIN(a, b) BLUEFOG_TEST_JOIN_(a, b)
#if __has_include(<mpi.h>) && defined(BLUEFOG_TEST_MPI)
#define BLUEFOG_TEST_OVER_MPI(body, name, tags)           \
  TEST_CASE(name " (MPI)", tags "[mpi]") {                \
    bluefog_test::on_mpi([](auto& comm) { body(comm); }); \
  }
#else
#define BLUEFOG_TEST_OVER_MPI(body, name, tags)
#endif
#ifdef BLUEFOG_TEST_NCCL
#define BLUEFOG_RANKS_TEST(body, name, tags)                     \
  template <class Comm>                                          \
  static void body(Comm& comm);                                  \
  TEST_CASE(name " (NCCL)", tags "[nccl]") {                     \
    bluefog_test::on_nccl([](auto& comm) { body(comm); }, tags); \
  }                                                              \
  template <class Comm>                                          \
  static void body([[maybe_unused]] Comm& comm)
#else
#define BLUEFOG_RANKS_TEST(body, name, tags)                  \
  template <class Comm>                                       \
  static void body(Comm& comm);                               \
  TEST_CASE(name " (threads)", tags "[thread]") {             \
    bluefog_test::on_threads([](auto& comm) { body(comm); }); \
  }                                                           \
  BLUEFOG_TEST_OVER_MPI(body, name, tags)                     \
  template <class Comm>                                       \
  static void body([[maybe_unused]] Comm& comm)
#endif
#define RANKS_TEST(name, tags) \
  BLUEFOG_RANKS_TEST(BLUEFOG_TEST_JOIN(ranks_test_, __COUNTER__), name, tags)
