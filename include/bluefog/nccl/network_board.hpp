// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/socket.h>

#include <bluefog/core/error.hpp>
#include <bluefog/nccl/board.hpp>
#include <bluefog/nccl/socket.hpp>

namespace bluefog::nccl {

/// The board of ranks on several hosts, kept by rank 0: a thread of it answers the others.
///
/// What stands on it are a few hundred bytes per rank and group. Who connects is trusted, as by
/// NCCL itself: the network has to be the job's own.
class board_server final {
 public:
  /// Starts to answer. \param name  what tells the board from others that may come to its port.
  /// \throws usage_error if the port is in use.
  explicit board_server(std::uint16_t port, std::string name = {})
      : listening_(listen_on(port)),
        port_(port_of(listening_)),
        name_(std::move(name)),
        thread_([this] { serve(); }) {}
  board_server(const board_server&) = delete;
  board_server& operator=(const board_server&) = delete;
  ~board_server() {
    ending_ = true;
    thread_.join();
  }

  [[nodiscard]] std::uint16_t port() const noexcept { return port_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  /// \return the first text of every connection to the board `name`, which is answered by itself.
  ///         A connection that begins otherwise is closed.
  [[nodiscard]] static std::string greeting(std::string_view name) {
    return concat("bluefog board 2 ", name);
  }

 private:
  struct guest {
    unique_socket socket;
    bool greeted = false;
  };

  void serve() noexcept {
    constexpr int milliseconds_between_looks = 20;
    while (!ending_) {
      std::vector<pollfd> ready{{listening_.get(), POLLIN, 0}};
      for (const guest& each : guests_) ready.push_back({each.socket.get(), POLLIN, 0});
      if (poll(ready.data(), ready.size(), milliseconds_between_looks) <= 0) continue;
      std::vector<guest> staying;
      for (std::size_t i = 0; i < guests_.size(); ++i)
        if (ready[i + 1].revents == 0 || answer(guests_[i]))
          staying.push_back(std::move(guests_[i]));
      guests_ = std::move(staying);
      if ((ready[0].revents & POLLIN) == 0) continue;
      unique_socket arrived(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!arrived) continue;
      set_patience(arrived, std::chrono::seconds(2));  // nobody holds up the others for long
      guests_.push_back({std::move(arrived)});
    }
  }

  // Serves one request: a key alone asks, a key and "=" with a value writes, and a key and "*" asks
  // for all keys that begin so.
  [[nodiscard]] bool answer(guest& from) {
    const auto key = receive_framed(from.socket);
    if (!key) return false;
    if (!from.greeted) {
      from.greeted = *key == greeting(name_);
      return from.greeted && send_all(from.socket, framed(*key));
    }
    const auto action = receive_framed(from.socket);
    if (!action) return false;
    if (action->starts_with('*')) {
      std::string all;
      for (const auto& [rest, value] : detail::under(values_, *key))
        all += framed(rest) + framed(value);
      return send_all(from.socket, framed(all));
    }
    if (!action->empty()) {
      values_[*key] = action->substr(1);
      return send_all(from.socket, framed("="));
    }
    const auto found = values_.find(*key);
    return send_all(from.socket, framed(found == values_.end() ? "" : "=" + found->second));
  }

  unique_socket listening_;
  std::uint16_t port_;
  std::string name_;
  std::atomic<bool> ending_ = false;
  std::vector<guest> guests_;  // of the thread
  board::texts values_;        // of the thread
  std::thread thread_;
};

/// \return whether the board `name` answers on `connection`, as it has to for a `network_board`.
[[nodiscard]] inline bool leads_to_board(const unique_socket& connection, std::string_view name) {
  const std::string greeting = board_server::greeting(name);
  return send_all(connection, framed(greeting)) && receive_framed(connection) == greeting;
}

/// A connection to rank 0's board.
class network_board final : public board {
 public:
  /// \param connection  one that `leads_to_board`. \param home  on rank 0 the board itself, which
  /// lives as long as this does.
  explicit network_board(unique_socket connection, std::unique_ptr<board_server> home = nullptr)
      : home_(std::move(home)), connection_(std::move(connection)) {}

  void put(const std::string& key, const std::string& value) override {
    static_cast<void>(ask(key, "=" + value));
  }
  [[nodiscard]] std::optional<std::string> look(const std::string& key) override {
    auto answer = ask(key, "");
    return answer.empty() ? std::nullopt : std::optional(answer.substr(1));
  }
  [[nodiscard]] texts look_for_all(const std::string& topic) override {
    const std::string answer = ask(topic, "*");
    texts found;
    for (std::string_view left = answer; !left.empty();) {
      auto rest = take_framed(left);
      found.emplace(std::move(rest), take_framed(left));
    }
    return found;
  }

 private:
  [[nodiscard]] std::string ask(const std::string& key, const std::string& action) {
    const std::scoped_lock lock(mutex_);
    std::optional<std::string> answer;
    if (send_all(connection_, framed(key) + framed(action))) answer = receive_framed(connection_);
    if (!answer) connection_ = {};  // a late answer would be taken for that to the next question
    expects<peer_error>(answer.has_value(),
                        "nccl_backend: rank 0, which ranks find each other through, has ended");
    return *std::move(answer);
  }

  std::unique_ptr<board_server> home_;
  std::mutex mutex_;
  unique_socket connection_;
};

}  // namespace bluefog::nccl
