// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

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

TEST_CASE("a process that counts its threads", "[.][child-of-threads]") {
  const int ranks = number_in("BLUEFOG_TEST_RANKS");
  if (ranks == 0) return;
  const int chosen = number_in("BLUEFOG_TEST_CHOSEN");
  if (chosen > 0) at::set_num_threads(chosen);
  int wanted = std::max(1, bluefog::allowed_cores() / ranks);
  if (chosen > 0) wanted = chosen;
  if (const int environment = number_in("OMP_NUM_THREADS"); environment > 0) wanted = environment;
  std::string said;
  const auto before = bluefog::logger::sink([&](bluefog::log_level, std::string_view text) {
    if (text.find("libtorch uses") != std::string_view::npos) said += bluefog::concat(text, "\n");
  });
  bluefog::run_threads(ranks, [&](auto& comm) {
    bluefog::allreduce(comm, at::ones({2}));
    require_equal(at::get_num_threads(), wanted);
    bluefog::allreduce(comm, at::ones({2}));
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
  CHECK(run_child("BLUEFOG_TEST_CHOSEN=5", 2) == 0);
}
