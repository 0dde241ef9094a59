// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include <bluefog/core/settings.hpp>

#include "support/catch.hpp"
#include "support/environment.hpp"

using namespace std::chrono_literals;
using bluefog::settings;
using bluefog::usage_error;
using bluefog_test::environment;

namespace {

[[nodiscard]] std::string refusal(const char* name, const char* value) {
  const environment set(name, value);
  try {
    static_cast<void>(settings::from_environment());
  } catch (const usage_error& problem) {
    return problem.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("the environment is read as it is", "[core][settings]") {
  const environment check("BLUEFOG_CHECK", "1"), timeout("BLUEFOG_TIMEOUT", "2.5"),
      stall("BLUEFOG_STALL_WARNING", "1e-3"), machine("BLUEFOG_NODES_PER_MACHINE", "3"),
      level("BLUEFOG_LOG_LEVEL", "debug"), hide("BLUEFOG_LOG_HIDE_TIME", "1"),
      threads("BLUEFOG_MPI_THREAD_LEVEL", "2"), singleton("BLUEFOG_ALLOW_SINGLETON", "1"),
      shared("BLUEFOG_ALLOW_SHARED_DEVICE", "1"), host("BLUEFOG_OPS_ON_CPU", "1");
  const auto values = settings::from_environment();
  CHECK(values.check);
  CHECK(values.timeout == 2500ms);
  CHECK(values.stall_warning == 1ms);
  CHECK(values.ranks_per_machine == 3);
  CHECK(values.level == bluefog::log_level::debug);
  CHECK(values.log_hide_time);
  CHECK(values.mpi_thread_level == 2);
  CHECK(values.allow_singleton);
  CHECK(values.allow_shared_device);
  CHECK(values.ops_on_cpu);
  CHECK(values.to_string() ==
        "BLUEFOG_CHECK=1\nBLUEFOG_TIMEOUT=2.5\nBLUEFOG_STALL_WARNING=0.001\n"
        "BLUEFOG_NODES_PER_MACHINE=3\nBLUEFOG_LOG_LEVEL=debug\nBLUEFOG_LOG_HIDE_TIME=1\n"
        "BLUEFOG_MPI_THREAD_LEVEL=2\nBLUEFOG_ALLOW_SINGLETON=1\nBLUEFOG_ALLOW_SHARED_DEVICE=1\n"
        "BLUEFOG_OPS_ON_CPU=1\n");
}

TEST_CASE("without an environment everything is as README's table says", "[core][settings]") {
  const environment check("BLUEFOG_CHECK", nullptr), timeout("BLUEFOG_TIMEOUT", nullptr),
      stall("BLUEFOG_STALL_WARNING", nullptr), machine("BLUEFOG_NODES_PER_MACHINE", nullptr),
      level("BLUEFOG_LOG_LEVEL", nullptr), hide("BLUEFOG_LOG_HIDE_TIME", nullptr),
      threads("BLUEFOG_MPI_THREAD_LEVEL", nullptr), singleton("BLUEFOG_ALLOW_SINGLETON", nullptr),
      shared("BLUEFOG_ALLOW_SHARED_DEVICE", nullptr), host("BLUEFOG_OPS_ON_CPU", nullptr);
  CHECK(settings::from_environment().to_string() ==
        "BLUEFOG_CHECK=0\nBLUEFOG_TIMEOUT=1800\nBLUEFOG_STALL_WARNING=60\n"
        "BLUEFOG_NODES_PER_MACHINE=shared memory\nBLUEFOG_LOG_LEVEL=warning\n"
        "BLUEFOG_LOG_HIDE_TIME=0\nBLUEFOG_MPI_THREAD_LEVEL=3\nBLUEFOG_ALLOW_SINGLETON=0\n"
        "BLUEFOG_ALLOW_SHARED_DEVICE=0\nBLUEFOG_OPS_ON_CPU=0\n");
}

TEST_CASE("the effective values name every variable of the table", "[core][settings]") {
  const auto text = settings().to_string();
  for (const auto& row : settings::table)
    CHECK(text.find(std::string(row.name) + "=") != std::string::npos);
  CHECK(static_cast<std::size_t>(std::ranges::count(text, '\n')) == settings::table.size());
}

TEST_CASE("an empty variable is none", "[core][settings]") {
  const environment empty("BLUEFOG_TIMEOUT", "");
  CHECK(settings::from_environment().timeout == settings().timeout);
}

TEST_CASE("a bad value names its variable, what it may be and what it was", "[core][settings]") {
  CHECK(refusal("BLUEFOG_CHECK", "yes") == "settings: BLUEFOG_CHECK must be 0 or 1, got \"yes\"");
  CHECK(refusal("BLUEFOG_CHECK", "2") == "settings: BLUEFOG_CHECK must be 0 or 1, got \"2\"");
  for (const char* bad : {"0", "-1", "nan", "inf", "1e99", "10s", "abc", " 1"})
    CHECK(refusal("BLUEFOG_TIMEOUT", bad) ==
          "settings: BLUEFOG_TIMEOUT must be seconds > 0, got \"" + std::string(bad) + "\"");
  for (const char* bad : {"0", "-2", "1.5", "99999999999"})
    CHECK(refusal("BLUEFOG_NODES_PER_MACHINE", bad).find("BLUEFOG_NODES_PER_MACHINE must be") !=
          std::string::npos);
  for (const char* bad : {"loud", "Warning", "6"})
    CHECK(refusal("BLUEFOG_LOG_LEVEL", bad).find("trace, debug, info") != std::string::npos);
  CHECK(refusal("BLUEFOG_MPI_THREAD_LEVEL", "4").find("0, 1, 2 or 3") != std::string::npos);
  CHECK(refusal("BLUEFOG_LOG_LEVEL", "fatal") == "accepted");  // a level of BlueFog's
}

TEST_CASE("a variable that nobody reads is named", "[core][settings]") {
  const environment unknown("BLUEFOG_TIMOUT", "3"), known("BLUEFOG_TIMEOUT", "3"),
      of_the_build("BLUEFOG_TORCH_PYTHON", "python3");
  const auto names = settings::unknown_variables();
  CHECK(std::ranges::count(names, "BLUEFOG_TIMOUT") == 1);
  CHECK(std::ranges::count(names, "BLUEFOG_TIMEOUT") == 0);
  CHECK(std::ranges::count(names, "BLUEFOG_TORCH_PYTHON") == 0);
}

TEST_CASE("unknown variables are warned of once per process", "[core][settings]") {
  const environment unknown("BLUEFOG_TIMOUT", "3");
  std::vector<std::string> said;
  auto before =
      bluefog::logger::sink([&](auto, std::string_view text) { said.emplace_back(text); });
  for (int i = 0; i < 3; ++i) bluefog::apply_log_settings(settings());
  bluefog::logger::sink(std::move(before));
  CHECK(std::ranges::count(said, "settings: BLUEFOG_TIMOUT is not a variable of bluefog") == 1);
}
