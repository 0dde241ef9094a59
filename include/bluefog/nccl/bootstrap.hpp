// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include <unistd.h>

#include <bluefog/core/error.hpp>
#include <bluefog/core/settings.hpp>
#include <bluefog/nccl/board.hpp>
#include <bluefog/nccl/library.hpp>
#include <bluefog/nccl/network_board.hpp>
#include <bluefog/nccl/socket.hpp>

namespace bluefog::nccl {

/// What ranks need to find each other: a number each, and a board that all of them see. May be used
/// again, for as many communicators as the program wants.
struct meeting {
  int rank = 0;
  int size = 1;
  std::shared_ptr<board> words;
  /// How long to wait for the other ranks (`BLUEFOG_TIMEOUT`).
  std::chrono::milliseconds timeout = settings::from_environment().timeout;
};

namespace detail {

/// \return environment variable `name`. \throws usage_error if it is missing or empty.
[[nodiscard]] inline std::string text_from_environment(const char* name) {
  const char* text = std::getenv(name);
  expects(
      text != nullptr && *text != '\0', "nccl_backend: the environment lacks ", name,
      "; a launcher such as torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or use "
      "nccl::meet_by_file or nccl::meet_over");
  return text;
}

/// \return the number in environment variable `name`.
/// \throws usage_error if it is missing or no number in [least, most].
[[nodiscard]] inline int number_from_environment(const char* name, int least, int most) {
  const std::string digits = text_from_environment(name);
  int number = 0;
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  expects(problem == std::errc() && end == digits.data() + digits.size() && number >= least &&
              number <= most,
          "nccl_backend: ", name, " must be an integer in [", least, ", ", most, "], got \"",
          digits, "\"");
  return number;
}

inline void expects_place(int rank, int size) {
  expects(size >= 1, "nccl_backend: the number of ranks must be at least 1, got ", size);
  expects(rank >= 0 && rank < size, "nccl_backend: the rank must be in [0, ", size, "), got ",
          rank);
}

[[nodiscard]] inline std::shared_ptr<board> open_board(std::unique_ptr<board_server> home) {
  auto connection = connect_to("127.0.0.1", home->port());
  expects<peer_error>(connection && leads_to_board(*connection, home->name()),
                      "nccl_backend: rank 0 cannot reach its own port ", home->port());
  return std::make_shared<network_board>(*std::move(connection), std::move(home));
}

/// Where a board can be reached.
struct board_place {
  std::string host;
  std::uint16_t port = 0;
  std::string name = {};  ///< of the board
};

/// Asks `where` for a `board_place`, if there is one, until the board answers there.
template <class Where>
[[nodiscard]] std::shared_ptr<board> reach_board(Where where, std::chrono::milliseconds timeout,
                                                 std::string_view through) {
  const auto deadline = deadline_after(timeout);
  std::string stranger;
  for (;;) {
    if (const std::optional<board_place> place = where())
      if (auto connection = connect_to(place->host, place->port)) {
        if (leads_to_board(*connection, place->name))
          return std::make_shared<network_board>(*std::move(connection));
        stranger = concat("; somebody else answers on port ", place->port, " of ", place->host);
      }
    expects<timeout_error>(std::chrono::steady_clock::now() < deadline,
                           "nccl_backend: rank 0 was not found through ", through, " in time",
                           stranger);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

/// \return the board that an earlier call for `place` has given in this process, or else what
///         `make` gives. It is kept until the process ends: communicators can be made again and
///         again, also while another rank still has the last one.
template <class Make>
[[nodiscard]] std::shared_ptr<board> lasting_board(const std::string& place, Make make) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<board>> known;
  {
    const std::scoped_lock lock(mutex);
    if (const auto found = known.find(place); found != known.end()) return found->second;
  }
  const std::shared_ptr<board> made = make();
  const std::scoped_lock lock(mutex);
  return known.emplace(place, made).first->second;
}

/// What ranks meet on whose rank 0 listens on `port` of `host`.
[[nodiscard]] inline meeting meet_at(const std::string& host, std::uint16_t port, int rank,
                                     int size) {
  meeting made{.rank = rank, .size = size, .words = nullptr};
  made.words =
      lasting_board(concat("rank ", rank, " of ", size, " at ", host, ", port ", port), [&] {
        if (rank == 0) return open_board(std::make_unique<board_server>(port));
        const std::optional place = board_place{host, port};
        return reach_board([&] { return place; }, made.timeout,
                           concat("MASTER_ADDR=", host, ", port ", port));
      });
  return made;
}

/// What rank 0 tells the others about its board, a line each: its host's identity, the host's name,
/// the port, and the board's name.
[[nodiscard]] inline std::string board_address(const board_server& of) {
  const std::string host = library::host();
  return concat(host, "\n", host.substr(0, host.find('/')), "\n", of.port(), "\n", of.name(), "\n");
}

/// \return what `board_address` made the text of, nothing if it is not whole.
[[nodiscard]] inline std::optional<board_place> place_in(const std::string& text) {
  std::istringstream lines(text);
  std::string identity, port;
  board_place found;
  for (std::string* line : {&identity, &found.host, &port, &found.name})
    if (!std::getline(lines, *line) || lines.eof()) return std::nullopt;
  std::from_chars(port.data(), port.data() + port.size(), found.port);
  if (identity == library::host()) found.host = "127.0.0.1";
  return found;
}

/// Opens a board and writes into `file` where it is.
[[nodiscard]] inline std::shared_ptr<board> open_board_at(const std::filesystem::path& file,
                                                          std::string name) {
  auto home = std::make_unique<board_server>(std::uint16_t{0}, std::move(name));
  const auto aside = std::filesystem::path(file).concat("." + std::to_string(getpid()));
  {
    std::ofstream out(aside);
    out << board_address(*home);
    out.flush();
    expects(out.good(), "nccl_backend: rank 0 cannot write ", aside.string());
  }
  std::error_code problem;
  std::filesystem::rename(aside, file, problem);  // at once: nobody reads half of it
  expects(!problem, "nccl_backend: rank 0 cannot write ", file.string(), ": ", problem.message());
  return open_board(std::move(home));
}

}  // namespace detail

/// Ranks of `torchrun` and launchers like it: `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`.
///
/// Rank 0 listens on the master's port plus one, since the launcher may use the port itself.
/// Collective. \throws usage_error that names the variable which is missing or wrong;
/// timeout_error if rank 0 cannot be reached.
[[nodiscard]] inline meeting meet_by_environment() {
  constexpr int most = std::numeric_limits<int>::max();
  const int size = detail::number_from_environment("WORLD_SIZE", 1, most);
  const int rank = detail::number_from_environment("RANK", 0, size - 1);
  if (size == 1) return {.rank = 0, .size = 1, .words = std::make_shared<local_board>()};
  const auto port =
      static_cast<std::uint16_t>(detail::number_from_environment("MASTER_PORT", 1, 65534) + 1);
  return detail::meet_at(detail::text_from_environment("MASTER_ADDR"), port, rank, size);
}

/// Ranks that share a file system, or a host: rank 0 writes into the file where it can be reached.
///
/// Collective. \param file  the same path on every rank, of a file that is not there before the job
/// starts; rank 0 replaces what is. The board is kept until the process ends: ranks may meet there
/// again.
/// \throws usage_error if the numbers are wrong or the file cannot be written; timeout_error
///         if rank 0 does not come.
[[nodiscard]] inline meeting meet_by_file(const std::filesystem::path& file, int rank, int size) {
  detail::expects_place(rank, size);
  meeting made{.rank = rank, .size = size, .words = nullptr};
  const std::string path = std::filesystem::absolute(file).string();
  const std::string kind = concat(" for ", size, " ranks");
  made.words = detail::lasting_board(concat("rank ", rank, kind, " by ", path), [&] {
    std::random_device chance;
    if (rank == 0) return detail::open_board_at(file, concat(chance(), chance(), kind));
    const auto where = [&] {
      std::ifstream in(file);
      auto place = detail::place_in(
          std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()));
      if (place && !place->name.ends_with(kind)) place.reset();  // of an earlier meeting
      return place;
    };
    return detail::reach_board(where, made.timeout, "the file " + file.string());
  });
  return made;
}

}  // namespace bluefog::nccl
