// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <unistd.h>

#include <bluefog/core/error.hpp>
#include <bluefog/core/logger.hpp>

namespace bluefog {

/// What the environment says about this process, checked.
///
/// `settings::table` lists every variable; reading one that holds something else is a
/// `usage_error` that names the variable, what it may hold and what it held.
struct settings {
  /// One environment variable of the library.
  struct variable {
    std::string_view name;
    std::string_view values;   ///< what it may hold
    std::string_view meaning;  ///< one line for people
  };

  /// Times are no longer than this: over thirty years, far from the clock's own limit.
  static constexpr std::chrono::milliseconds longest_time = std::chrono::seconds(1'000'000'000);

  static constexpr std::array table{
      variable{"BLUEFOG_CHECK", "0 or 1", "compare every operation over ranks before it starts"},
      variable{"BLUEFOG_TIMEOUT", "seconds > 0", "longest wait for an operation"},
      variable{"BLUEFOG_STALL_WARNING", "seconds > 0", "wait after which missing ranks are named"},
      variable{"BLUEFOG_NODES_PER_MACHINE", "integer >= 1",
               "consecutive ranks that count as one machine"},
      variable{"BLUEFOG_LOG_LEVEL", "trace, debug, info, warning, error or off",
               "lowest level that the log says"},
      variable{"BLUEFOG_LOG_HIDE_TIME", "0 or 1", "log lines without the time of day"},
      variable{"BLUEFOG_MPI_THREAD_LEVEL", "0, 1, 2 or 3",
               "thread level asked of MPI: single, funneled, serialized, multiple"},
      variable{"BLUEFOG_ALLOW_SINGLETON", "0 or 1",
               "accept one rank although a launcher started several"},
      variable{"BLUEFOG_ALLOW_SHARED_DEVICE", "0 or 1", "accept several NCCL ranks on one device"},
      variable{"BLUEFOG_OPS_ON_CPU", "0 or 1", "tensors of a device travel as host memory"},
  };

  /// Beginnings of variables that the build, the tests and the benchmarks read.
  static constexpr std::array<std::string_view, 4> others = {"BLUEFOG_TEST_", "BLUEFOG_BENCHMARK_",
                                                             "BLUEFOG_WITH_", "BLUEFOG_TORCH_"};

  bool check = false;
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  std::chrono::milliseconds stall_warning = std::chrono::seconds(60);
  std::optional<int> ranks_per_machine;
  log_level level = log_level::warning;
  bool log_hide_time = false;
  int mpi_thread_level = 3;
  bool allow_singleton = false;
  bool allow_shared_device = false;
  bool ops_on_cpu = false;

  /// Reads the environment as it is now.
  /// \throws usage_error if a variable of the table holds something else than it may.
  [[nodiscard]] static settings from_environment() {
    settings result;
    read("BLUEFOG_CHECK", result.check);
    read("BLUEFOG_TIMEOUT", result.timeout);
    read("BLUEFOG_STALL_WARNING", result.stall_warning);
    if (int ranks = 0; read("BLUEFOG_NODES_PER_MACHINE", ranks, 1))
      result.ranks_per_machine = ranks;
    read("BLUEFOG_LOG_LEVEL", result.level);
    read("BLUEFOG_LOG_HIDE_TIME", result.log_hide_time);
    read("BLUEFOG_MPI_THREAD_LEVEL", result.mpi_thread_level, 0, 3);
    read("BLUEFOG_ALLOW_SINGLETON", result.allow_singleton);
    read("BLUEFOG_ALLOW_SHARED_DEVICE", result.allow_shared_device);
    read("BLUEFOG_OPS_ON_CPU", result.ops_on_cpu);
    return result;
  }

  /// \return names in the environment that begin with BLUEFOG_ and that nobody reads.
  [[nodiscard]] static std::vector<std::string> unknown_variables() {
    std::vector<std::string> unknown;
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
      const std::string_view text(*entry);
      const auto name = text.substr(0, text.find('='));
      const bool listed = std::ranges::any_of(table, [&](auto& row) { return row.name == name; });
      const bool elsewhere =
          std::ranges::any_of(others, [&](auto prefix) { return name.starts_with(prefix); });
      if (name.starts_with("BLUEFOG_") && !listed && !elsewhere) unknown.emplace_back(name);
    }
    return unknown;
  }

  /// \return the effective values, one `NAME=value` a line, in the table's order.
  [[nodiscard]] std::string to_string() const {
    const auto seconds = [](auto time) { return std::chrono::duration<double>(time).count(); };
    std::string machine = ranks_per_machine ? std::to_string(*ranks_per_machine) : "shared memory";
    return concat("BLUEFOG_CHECK=", check, "\nBLUEFOG_TIMEOUT=", seconds(timeout),
                  "\nBLUEFOG_STALL_WARNING=", seconds(stall_warning),
                  "\nBLUEFOG_NODES_PER_MACHINE=", machine, "\nBLUEFOG_LOG_LEVEL=", name_of(level),
                  "\nBLUEFOG_LOG_HIDE_TIME=", log_hide_time,
                  "\nBLUEFOG_MPI_THREAD_LEVEL=", mpi_thread_level,
                  "\nBLUEFOG_ALLOW_SINGLETON=", allow_singleton,
                  "\nBLUEFOG_ALLOW_SHARED_DEVICE=", allow_shared_device,
                  "\nBLUEFOG_OPS_ON_CPU=", ops_on_cpu, "\n");
  }

 private:
  [[nodiscard]] static std::optional<std::string_view> text_of(std::string_view name) {
    const char* text = std::getenv(name.data());
    return text != nullptr && *text != '\0' ? std::optional<std::string_view>(text) : std::nullopt;
  }

  [[noreturn]] static void refuse(std::string_view name, std::string_view text) {
    const auto row = std::ranges::find(table, name, &variable::name);
    throw usage_error(concat("settings: ", name, " must be ", row->values, ", got \"", text, "\""));
  }

  template <class Number>
  [[nodiscard]] static std::optional<Number> parse(std::string_view text) {
    Number value{};
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return value;
  }

  static void read(std::string_view name, bool& value) {
    int number = value ? 1 : 0;
    read(name, number, 0, 1);
    value = number == 1;
  }

  static bool read(std::string_view name, int& value, int least, int most = 1 << 30) {
    const auto text = text_of(name);
    if (!text) return false;
    const auto number = parse<int>(*text);
    if (!number || *number < least || *number > most) refuse(name, *text);
    value = *number;
    return true;
  }

  static void read(std::string_view name, std::chrono::milliseconds& value) {
    const auto text = text_of(name);
    if (!text) return;
    const auto number = parse<double>(*text);
    constexpr double longest = std::chrono::duration<double>(longest_time).count();
    if (!number || !std::isfinite(*number) || *number <= 0 || *number > longest)
      refuse(name, *text);
    value = std::chrono::milliseconds(std::max<std::int64_t>(1, std::llround(*number * 1e3)));
  }

  static void read(std::string_view name, log_level& value) {
    const auto text = text_of(name);
    if (!text) return;
    for (int level = 0; level <= static_cast<int>(log_level::off); ++level)
      if (*text == name_of(static_cast<log_level>(level))) {
        value = static_cast<log_level>(level);
        return;
      }
    if (*text == "fatal") {  // BlueFog's highest level
      value = log_level::error;
      return;
    }
    refuse(name, *text);
  }
};

/// Puts the log's part of `values` into force and warns, once per process, of unknown variables.
inline void apply_log_settings(const settings& values) {
  static const bool once = [&] {
    logger::level(values.level);
    logger::show_time(!values.log_hide_time);
    for (const auto& name : settings::unknown_variables())
      logger::write(log_level::warning,
                    concat("settings: ", name, " is not a variable of bluefog"));
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace bluefog
