// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

namespace bluefog {

/// How much a message matters; `off` is above all of them.
enum class log_level : std::uint8_t { trace, debug, info, warning, error, off };

/// \return the name in messages, e.g. "warning".
[[nodiscard]] constexpr std::string_view name_of(log_level level) noexcept {
  switch (level) {
    case log_level::trace: return "trace";
    case log_level::debug: return "debug";
    case log_level::info: return "info";
    case log_level::warning: return "warning";
    case log_level::error: return "error";
    case log_level::off: return "off";
  }
  return "unknown";
}

/// The library's only way of saying something without being asked: one sink per process.
///
/// Messages below the level (`warning` unless `BLUEFOG_LOG_LEVEL` says otherwise) are dropped; the
/// others go to the sink: standard error, one line each, unless the program put its own. All
/// functions may be called from any thread; the sink is called by one thread at a time.
class logger {
 public:
  using sink_type = std::function<void(log_level, std::string_view)>;

  /// Replaces the sink; an empty one restores standard error. \return the sink before.
  static sink_type sink(sink_type replacement) {
    const std::scoped_lock lock(state().mutex);
    return std::exchange(state().sink, std::move(replacement));
  }

  /// Sets the lowest level that is said. \return the level before.
  static log_level level(log_level lowest) noexcept { return state().level.exchange(lowest); }
  [[nodiscard]] static log_level level() noexcept { return state().level.load(); }

  /// Whether lines on standard error begin with the time of day.
  static void show_time(bool shown) noexcept { state().show_time = shown; }

  /// \return whether a message of `level` would reach the sink; guards costly texts.
  [[nodiscard]] static bool says(log_level level) noexcept { return level >= state().level.load(); }

  /// Hands `message` to the sink. Never throws: a failing sink loses the message.
  static void write(log_level level, std::string_view message) noexcept {
    if (!says(level)) return;
    try {
      const std::scoped_lock lock(state().mutex);
      if (state().sink)
        state().sink(level, message);
      else
        print(level, message);
    } catch (...) {  // nothing sensible is left to do with a message about a message
    }
  }

 private:
  struct shared {
    std::mutex mutex;
    sink_type sink;
    std::atomic<log_level> level = log_level::warning;
    std::atomic<bool> show_time = true;
  };

  // Never destroyed: communication threads may still speak while globals go down.
  static shared& state() noexcept {
    static auto* const instance = new shared;
    return *instance;
  }

  static void print(log_level level, std::string_view message) {
    std::string line = "[bluefog";
    if (state().show_time) {
      const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
      std::tm parts{};
      char text[16] = {};
      if (localtime_r(&now, &parts) != nullptr &&
          std::strftime(text, sizeof text, " %H:%M:%S", &parts) > 0)
        line += text;
    }
    line.append(" ").append(name_of(level)).append("] ").append(message).append("\n");
    std::fwrite(line.data(), 1, line.size(), stderr);
  }
};

}  // namespace bluefog
