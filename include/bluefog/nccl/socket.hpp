// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <bluefog/core/error.hpp>
#include <bluefog/core/unique_handle.hpp>

namespace bluefog::nccl {

struct socket_traits {
  using value_type = int;
  static int null() noexcept { return -1; }
  static void close(int handle) noexcept { static_cast<void>(::close(handle)); }
};
/// Owns a socket.
using unique_socket = unique_handle<socket_traits>;

/// \return the system's text for `errno`.
[[nodiscard]] inline std::string system_text() {
  return std::strerror(errno);
}

/// Limits how long sending and receiving on `socket` may take.
inline void set_patience(const unique_socket& socket, std::chrono::seconds time) {
  const timeval limit{.tv_sec = time.count(), .tv_usec = 0};
  static_cast<void>(setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
  static_cast<void>(setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit));
  const int at_once = 1;
  static_cast<void>(setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once));
}

/// \return a socket that listens on `port` of all interfaces, on a free one if it is 0.
/// \throws usage_error if the port is in use.
[[nodiscard]] inline unique_socket listen_on(std::uint16_t port) {
  unique_socket made(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int again = 1;
  static_cast<void>(setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &again, sizeof again));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(port);
  constexpr int waiting = 1024;
  const bool listens =
      made && bind(made.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
      ::listen(made.get(), waiting) == 0;
  expects(listens, "nccl_backend: rank 0 cannot listen on port ", port, ": ", system_text());
  return made;
}

/// \return the port that `socket` listens on.
[[nodiscard]] inline std::uint16_t port_of(const unique_socket& socket) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  const bool named = getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0;
  expects(named, "nccl_backend: getsockname failed: ", system_text());
  return ntohs(address.sin_port);
}

/// \return a connection, nothing if nobody answers there now.
[[nodiscard]] inline std::optional<unique_socket> connect_to(const std::string& host,
                                                             std::uint16_t port) {
  addrinfo wanted{};
  wanted.ai_family = AF_INET;
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found) != 0)
    return std::nullopt;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    unique_socket made(::socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!made) continue;
    set_patience(made, std::chrono::seconds(10));
    if (connect(made.get(), each->ai_addr, each->ai_addrlen) == 0) return made;
  }
  return std::nullopt;
}

/// \return whether a signal, not the other side, has ended a call that gave `result`: a socket with
///         limited patience does not go on by itself.
[[nodiscard]] inline bool interrupted(ssize_t result) noexcept {
  return result < 0 && errno == EINTR;
}

/// Sends all of `data`. \return whether the other side took it.
[[nodiscard]] inline bool send_all(const unique_socket& socket, std::string_view data) {
  while (!data.empty()) {
    const auto sent = ::send(socket.get(), data.data(), data.size(), MSG_NOSIGNAL);
    if (interrupted(sent)) continue;
    if (sent <= 0) return false;
    data.remove_prefix(static_cast<std::size_t>(sent));
  }
  return true;
}

/// \return exactly `length` bytes, nothing if the other side has gone.
[[nodiscard]] inline std::optional<std::string> receive_all(const unique_socket& socket,
                                                            std::size_t length) {
  std::string data(length, '\0');
  for (std::size_t got = 0; got < length;) {
    const auto more = ::recv(socket.get(), data.data() + got, length - got, 0);
    if (interrupted(more)) continue;
    if (more <= 0) return std::nullopt;
    got += static_cast<std::size_t>(more);
  }
  return data;
}

/// A text as it travels: its length, then itself.
[[nodiscard]] inline std::string framed(std::string_view text) {
  const auto length = static_cast<std::uint32_t>(text.size());
  std::array<char, sizeof length> head{};
  std::memcpy(head.data(), &length, sizeof length);
  return std::string(head.data(), head.size()).append(text);
}

/// Takes the first of the framed texts that `from` consists of; `from` is not empty and whole.
[[nodiscard]] inline std::string take_framed(std::string_view& from) {
  std::uint32_t length = 0;
  std::memcpy(&length, from.data(), sizeof length);
  std::string text(from.substr(sizeof length, length));
  from.remove_prefix(sizeof length + length);
  return text;
}

/// \return the next text, nothing if the other side has gone or sends something else.
[[nodiscard]] inline std::optional<std::string> receive_framed(const unique_socket& socket) {
  constexpr std::uint32_t longest = 1 << 26;
  const auto head = receive_all(socket, sizeof(std::uint32_t));
  if (!head) return std::nullopt;
  std::uint32_t length = 0;
  std::memcpy(&length, head->data(), sizeof length);
  return length <= longest ? receive_all(socket, length) : std::nullopt;
}

}  // namespace bluefog::nccl
