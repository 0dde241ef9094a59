// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#include <dlfcn.h>
#include <unistd.h>

#include <bluefog/tensor.hpp>
#include <bluefog/tensor/threads.hpp>

#include "tensor/support.hpp"

using namespace bluefog_test;

// The number of threads is decided once per process, so each case is a process of its own: this
// program, started again with a hidden test case, a number of ranks and an environment.
static int run_child(const std::string& environment, int ranks) {
  const std::string command =
      "env -u OMP_NUM_THREADS -u MKL_NUM_THREADS " + environment +
      " BLUEFOG_LOG_LEVEL=info BLUEFOG_TEST_RANKS=" + std::to_string(ranks) +
      " \"$(readlink /proc/" + std::to_string(getpid()) +
      "/exe)\" '[child-of-threads]' > /dev/null";
  return std::system(command.c_str());
}

static int number_in(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? 0 : std::atoi(text);
}

// What an MPI library may do: OpenMP's number for the calling thread alone, past libtorch.
static void tell_openmp(int threads) {
  auto* const set = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
  if (set != nullptr) reinterpret_cast<void (*)(int)>(set)(threads);  // else libtorch has no OpenMP
}

// The number that a rank of `ranks` on this machine has to work with.
static int wanted_threads(int ranks) {
  if (const int environment = number_in("OMP_NUM_THREADS"); environment > 0) return environment;
  if (const int chosen = number_in("BLUEFOG_TEST_CHOSEN"); chosen > 0) return chosen;
  return std::max(1, bluefog::allowed_cores() / ranks);
}

TEST_CASE("a process that counts its threads", "[.][child-of-threads]") {
  const int ranks = number_in("BLUEFOG_TEST_RANKS");
  if (ranks == 0) return;
  const int chosen = number_in("BLUEFOG_TEST_CHOSEN");
  if (chosen > 0) at::set_num_threads(chosen);
  const int openmp = number_in("BLUEFOG_TEST_OPENMP");
  const int wanted = wanted_threads(ranks);
  static std::string said;
  const auto before = bluefog::logger::sink([](bluefog::log_level, std::string_view text) {
    if (text.find("libtorch uses") != std::string_view::npos) said += bluefog::concat(text, "\n");
  });
  bluefog::run_threads(ranks, [&](auto& comm) {
    if (openmp > 0) tell_openmp(openmp);
    static_cast<void>(bluefog::allreduce(comm, at::ones({2})));
    require_equal(at::get_num_threads(), wanted);
    static_cast<void>(bluefog::allreduce(comm, at::ones({2})));
  });
  bluefog::logger::sink(before);
  const auto lines = std::count(said.begin(), said.end(), '\n');
  const bool decided = number_in("OMP_NUM_THREADS") == 0 &&
                       (chosen == 0 || chosen == bluefog::detail::intraop_threads_at_start);
  CHECK(lines == (decided ? 1 : 0));
}

TEST_CASE("ranks share the cores, unless the environment or the program says otherwise",
          "[tensor][threads][thread]") {
  CHECK(run_child("", 1) == 0);
  CHECK(run_child("", 2) == 0);
  CHECK(run_child("", 64) == 0);
  CHECK(run_child("OMP_NUM_THREADS=2", 2) == 0);
  CHECK(run_child("BLUEFOG_TEST_CHOSEN=1", 1) == 0);
  const int other = bluefog::allowed_cores() + 3;  // neither a share nor what libtorch starts with
  CHECK(run_child(bluefog::concat("BLUEFOG_TEST_CHOSEN=", other), 2) == 0);
}

TEST_CASE("a number that only OpenMP was told on a rank's thread is not the program's choice",
          "[tensor][threads][thread]") {
  CHECK(run_child("BLUEFOG_TEST_OPENMP=1", 1) == 0);
}

TEST_CASE("what the program chooses after the first operation holds on threads to come",
          "[.][child-of-threads]") {
  if (number_in("BLUEFOG_TEST_RANKS") != 1 || number_in("OMP_NUM_THREADS") != 0) return;
  const int other = bluefog::allowed_cores() + 3;
  bluefog::run_threads(1, [&](auto& comm) {
    static_cast<void>(bluefog::allreduce(comm, at::ones({2})));
    at::set_num_threads(other);
  });
  bluefog::run_threads(1, [&](auto& comm) {
    static_cast<void>(bluefog::allreduce(comm, at::ones({2})));
    require_equal(at::get_num_threads(), other);
  });
}

#ifdef BLUEFOG_TEST_MPI
// Started by CMakeLists.txt, without the OMP_NUM_THREADS of other tests.
TEST_CASE("a process of several counts its threads", "[.][share-over-mpi]") {
  bluefog::communicator<bluefog::mpi_backend> comm;
  if (number_in("OMP_NUM_THREADS") == 0) tell_openmp(bluefog::allowed_cores() + 3);
  static_cast<void>(bluefog::allreduce(comm, at::ones({2})));
  CHECK(at::get_num_threads() == wanted_threads(comm.size()));
}
#endif
