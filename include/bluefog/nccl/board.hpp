// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <bluefog/core/error.hpp>
#include <bluefog/core/settings.hpp>

namespace bluefog::nccl {

/// Where ranks leave words for one another that NCCL cannot carry.
///
/// Any thread may call any function.
class board {
 public:
  board() = default;
  board(const board&) = delete;
  board& operator=(const board&) = delete;
  virtual ~board() = default;

  using texts = std::map<std::string, std::string>;

  /// Writes `value` under `key`, where it replaces what stood there.
  virtual void put(const std::string& key, const std::string& value) = 0;
  /// \return what stands under `key`, nothing if nobody has written it yet. Does not wait.
  [[nodiscard]] virtual std::optional<std::string> look(const std::string& key) = 0;
  /// \return what stands under the keys that begin with `topic`, by the rest of its key. Does not
  ///         wait.
  [[nodiscard]] virtual texts look_for_all(const std::string& topic) = 0;

  using time_point = std::chrono::steady_clock::time_point;

  /// \return what stands under `key`, once it does.
  /// \param missing  who or what does not come if it never does, for the message.
  /// \throws timeout_error once it is `deadline`.
  [[nodiscard]] std::string wait(const std::string& key, time_point deadline,
                                 std::string_view missing) {
    using std::chrono::microseconds;
    for (microseconds pause(100);; pause = std::min(2 * pause, microseconds(20000))) {
      if (auto value = look(key)) return *std::move(value);
      expects<timeout_error>(std::chrono::steady_clock::now() < deadline, "nccl_backend: ", missing,
                             " did not come in time");
      std::this_thread::sleep_for(pause);
    }
  }
};

/// \return the time that is `timeout` from now, or as late as the clock can tell.
[[nodiscard]] inline board::time_point deadline_after(std::chrono::milliseconds timeout) {
  return std::chrono::steady_clock::now() + std::min(timeout, settings::longest_time);
}

namespace detail {

/// \return those of `values` whose key begins with `topic`, by the rest of the key.
[[nodiscard]] inline board::texts under(const board::texts& values, const std::string& topic) {
  board::texts found;
  for (auto it = values.lower_bound(topic); it != values.end() && it->first.starts_with(topic);
       ++it)
    found.emplace(it->first.substr(topic.size()), it->second);
  return found;
}

}  // namespace detail

/// A board for ranks of one process.
class local_board final : public board {
 public:
  void put(const std::string& key, const std::string& value) override {
    const std::scoped_lock lock(mutex_);
    values_[key] = value;
  }
  [[nodiscard]] std::optional<std::string> look(const std::string& key) override {
    const std::scoped_lock lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  [[nodiscard]] texts look_for_all(const std::string& topic) override {
    const std::scoped_lock lock(mutex_);
    return detail::under(values_, topic);
  }

 private:
  std::mutex mutex_;
  texts values_;
};

}  // namespace bluefog::nccl
