// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include <bluefog/core/settings.hpp>

#include "support/catch.hpp"

using namespace std::chrono_literals;
using bluefog::settings;
using bluefog::usage_error;

namespace {

/// Sets a variable while it lives.
class variable {
 public:
  variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  variable(const variable&) = delete;
  variable& operator=(const variable&) = delete;
  ~variable() {
    if (before_)
      setenv(name_, before_->c_str(), 1);
    else
      unsetenv(name_);
  }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

[[nodiscard]] std::string refusal(const char* name, const char* value) {
  const variable set(name, value);
  try {
    static_cast<void>(settings::from_environment());
  } catch (const usage_error& problem) {
    return problem.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("the environment is read as it is", "[core][settings]") {
  const variable check("BLUEFOG_CHECK", "1"), timeout("BLUEFOG_TIMEOUT", "2.5"),
      stall("BLUEFOG_STALL_WARNING", "1e-3"), machine("BLUEFOG_NODES_PER_MACHINE", "3"),
      level("BLUEFOG_LOG_LEVEL", "debug"), host("BLUEFOG_OPS_ON_CPU", "1");
  const auto values = settings::from_environment();
  CHECK(values.check);
  CHECK(values.timeout == 2500ms);
  CHECK(values.stall_warning == 1ms);
  CHECK(values.nodes_per_machine == 3);
  CHECK(values.ops_on_cpu);
  CHECK(values.level == bluefog::log_level::debug);
  const auto text = values.to_string();
  CHECK(text.find("BLUEFOG_CHECK=1\n") != std::string::npos);
  CHECK(text.find("BLUEFOG_TIMEOUT=2.5\n") != std::string::npos);
  CHECK(text.find("BLUEFOG_NODES_PER_MACHINE=3\n") != std::string::npos);
  CHECK(text.find("BLUEFOG_LOG_LEVEL=debug\n") != std::string::npos);
  CHECK(text.find("BLUEFOG_OPS_ON_CPU=1\n") != std::string::npos);
}

TEST_CASE("the effective values name every variable of the table", "[core][settings]") {
  const auto text = settings().to_string();
  for (const auto& row : settings::table)
    CHECK(text.find(std::string(row.name) + "=") != std::string::npos);
  CHECK(static_cast<std::size_t>(std::ranges::count(text, '\n')) == settings::table.size());
}

TEST_CASE("an empty variable is none", "[core][settings]") {
  const variable empty("BLUEFOG_TIMEOUT", "");
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
  const variable unknown("BLUEFOG_TIMOUT", "3"), known("BLUEFOG_TIMEOUT", "3"),
      of_the_build("BLUEFOG_TORCH_PYTHON", "python3");
  const auto names = settings::unknown_variables();
  CHECK(std::ranges::count(names, "BLUEFOG_TIMOUT") == 1);
  CHECK(std::ranges::count(names, "BLUEFOG_TIMEOUT") == 0);
  CHECK(std::ranges::count(names, "BLUEFOG_TORCH_PYTHON") == 0);
}

TEST_CASE("unknown variables are warned of once per process", "[core][settings]") {
  const variable unknown("BLUEFOG_TIMOUT", "3");
  std::vector<std::string> said;
  auto before =
      bluefog::logger::sink([&](auto, std::string_view text) { said.emplace_back(text); });
  for (int i = 0; i < 3; ++i) bluefog::apply_log_settings(settings());
  bluefog::logger::sink(std::move(before));
  CHECK(std::ranges::count(said, "settings: BLUEFOG_TIMOUT is not a variable of bluefog") == 1);
}
