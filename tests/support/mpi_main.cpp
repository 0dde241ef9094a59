// SPDX-License-Identifier: Apache-2.0
// main() of the tests that run under mpirun. Each rank holds its report back; at the end rank 0's
// and those of the ranks that failed are printed in rank order, and a failure on any rank is a
// failure of all. A failed assertion is said at once in one line, and so is, after
// BLUEFOG_TEST_PATIENCE seconds, the test that did not end.
//
// Started without a launcher it leaves MPI alone until a test asks for it.
#define CATCH_CONFIG_RUNNER
#include "support/catch.hpp"
#if __has_include(<catch2/reporters/catch_reporter_event_listener.hpp>)
#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>
#else
namespace Catch {
using EventListenerBase = TestEventListenerBase;
}
#endif

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

#include <mpi.h>
#include <unistd.h>

namespace {

int rank = 0;

/// What this rank is doing, for the signal handler: "rank 1 did not end: name of the test\n".
std::array<char, 512> doing{};

void say_and_end(int /*signal*/) {
  const std::string_view text(doing.data());
  if (::write(STDERR_FILENO, text.data(), text.size()) < 0) std::_Exit(125);
  std::_Exit(124);
}

/// Keeps the name of the running test, and tells of failures at once.
class listener : public Catch::EventListenerBase {
 public:
  using Catch::EventListenerBase::EventListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo& test) override {
    name_ = test.name;
    std::snprintf(doing.data(), doing.size(), "rank %d did not end: %s\n", rank, name_.c_str());
  }

  // Catch2 2 wants a bool, whether to clear the messages; 3 wants nothing.
  using result = std::invoke_result_t<decltype(&Catch::EventListenerBase::assertionEnded),
                                      Catch::EventListenerBase&, const Catch::AssertionStats&>;
  result assertionEnded(const Catch::AssertionStats& stats) override {
    const auto& outcome = stats.assertionResult;
    if (!outcome.isOk()) {
      const auto line = outcome.getSourceInfo();
      std::fprintf(stderr, "rank %d: %s:%zu failed in: %s\n", rank, line.file, line.line,
                   name_.c_str());
    }
    return static_cast<result>(false);
  }

 private:
  std::string name_;
};
CATCH_REGISTER_LISTENER(listener)

/// \return what BLUEFOG_TEST_THREAD_LEVEL asks for; the highest level if it is unset.
int wanted_thread_level() {
  const char* value = std::getenv("BLUEFOG_TEST_THREAD_LEVEL");
  const std::string_view level = value == nullptr ? "multiple" : value;
  if (level == "single") return MPI_THREAD_SINGLE;
  if (level == "funneled") return MPI_THREAD_FUNNELED;
  if (level == "serialized") return MPI_THREAD_SERIALIZED;
  return MPI_THREAD_MULTIPLE;
}

/// \return whether a launcher of any kind started this process.
bool launched() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"})
    if (std::getenv(name) != nullptr) return true;
  return false;
}

/// Runs the tests with their report held back. \return 0 if they passed.
int run_quietly(int argc, char** argv, std::ostringstream& report) {
  auto* terminal = std::cout.rdbuf(report.rdbuf());
  const int result = Catch::Session().run(argc, argv);
  std::cout.rdbuf(terminal);
  return result;
}

/// Prints the reports of rank 0 and of every rank that failed, on rank 0, in rank order.
void print_in_rank_order(const std::string& report, bool failed) {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const std::string text = failed || rank == 0 ? report : std::string();
  if (rank != 0) {
    MPI_Send(text.data(), static_cast<int>(text.size()), MPI_CHAR, 0, 0, MPI_COMM_WORLD);
    return;
  }
  std::cout << text;
  for (int source = 1; source < size; ++source) {
    MPI_Status status;
    MPI_Probe(source, 0, MPI_COMM_WORLD, &status);
    int length = 0;
    MPI_Get_count(&status, MPI_CHAR, &length);
    std::string other(static_cast<std::size_t>(length), ' ');
    MPI_Recv(other.data(), length, MPI_CHAR, source, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (!other.empty()) std::cout << "---- rank " << source << " ----\n" << other;
  }
  std::cout << std::flush;
}

}  // namespace

int main(int argc, char** argv) {
  if (!launched()) return Catch::Session().run(argc, argv);

  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, wanted_thread_level(), &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (const char* patience = std::getenv("BLUEFOG_TEST_PATIENCE")) {
    std::signal(SIGALRM, say_and_end);
    ::alarm(static_cast<unsigned>(std::atoi(patience)));
  }

  std::ostringstream report;
  int failed = run_quietly(argc, argv, report);
  print_in_rank_order(report.str(), failed != 0);

  // A failure on any rank fails the test on all, whatever mpirun would report.
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
