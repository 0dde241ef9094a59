// SPDX-License-Identifier: Apache-2.0

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <bluefog/core/logger.hpp>

#include "support/catch.hpp"

using bluefog::log_level;

namespace {

/// Puts sink and level back.
struct kept_log {
  bluefog::logger::sink_type sink = bluefog::logger::sink({});
  log_level level = bluefog::logger::level();
  ~kept_log() {
    bluefog::logger::sink(std::move(sink));
    bluefog::logger::level(level);
  }
};

}  // namespace

TEST_CASE("the sink gets what is at or above the level", "[core][log]") {
  const kept_log kept;
  std::vector<std::string> said;
  bluefog::logger::sink([&](log_level level, std::string_view text) {
    said.push_back(std::string(name_of(level)) + ": " + std::string(text));
  });
  CHECK(bluefog::logger::level(log_level::warning) == kept.level);
  bluefog::logger::write(log_level::info, "no");
  bluefog::logger::write(log_level::warning, "yes");
  bluefog::logger::level(log_level::trace);
  bluefog::logger::write(log_level::trace, "low");
  bluefog::logger::level(log_level::off);
  bluefog::logger::write(log_level::error, "never");
  CHECK(said == std::vector<std::string>{"warning: yes", "trace: low"});
  CHECK_FALSE(bluefog::logger::says(log_level::error));
}

TEST_CASE("a sink that throws loses the message and nothing else", "[core][log]") {
  const kept_log kept;
  bluefog::logger::sink([](log_level, std::string_view) { throw std::runtime_error("full"); });
  bluefog::logger::write(log_level::error, "lost");
  int calls = 0;
  auto before = bluefog::logger::sink([&](log_level, std::string_view) { ++calls; });
  CHECK(before);
  bluefog::logger::write(log_level::error, "said");
  CHECK(calls == 1);
}

TEST_CASE("one thread at a time speaks", "[core][log]") {
  const kept_log kept;
  int lines = 0;  // not atomic: ThreadSanitizer looks too
  bluefog::logger::sink([&](log_level, std::string_view) { ++lines; });
  {
    std::vector<std::jthread> speakers;
    for (int i = 0; i < 4; ++i)
      speakers.emplace_back([] {
        for (int k = 0; k < 500; ++k) bluefog::logger::write(log_level::error, "x");
      });
  }
  CHECK(lines == 2000);
}
