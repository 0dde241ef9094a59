// SPDX-License-Identifier: Apache-2.0
// With the real CUDA runtime, NVRTC and NCCL, on machines with and without a GPU.
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <bluefog/collective.hpp>
#include <bluefog/nccl.hpp>
#include <bluefog/thread.hpp>

#include "support/catch.hpp"
#include "support/environment.hpp"

using namespace bluefog;
using namespace std::chrono_literals;
using bluefog_test::ContainsSubstring;
using bluefog_test::environment;

TEST_CASE("NVRTC makes machine code of the kernels, and needs no device for it",
          "[nccl][kernels]") {
  CHECK(!nccl::compile_kernels(90).empty());
  CHECK_THROWS_AS(nccl::compile_kernels(1), transport_error);
}

TEST_CASE("without a device the backend is refused by name", "[nccl][bootstrap]") {
  if (nccl::library::device_count() > 0) return;
  const nccl::meeting alone{.words = std::make_shared<nccl::local_board>()};
  CHECK_THROWS_WITH(nccl_backend(alone), ContainsSubstring("no CUDA device is visible"));
}

TEST_CASE("a failed call says which it was, with code and text", "[nccl][errors]") {
  CHECK_THROWS_WITH(
      nccl::check(cudaErrorInvalidValue, "cudaMalloc"),
      ContainsSubstring("cudaMalloc failed with CUDA error 1 (cudaErrorInvalidValue): "));
  try {
    nccl::check(ncclInvalidArgument, "ncclSend");
    FAIL("nothing was thrown");
  } catch (const transport_error& problem) {
    CHECK(problem.code() == ncclInvalidArgument);
    CHECK_THAT(problem.what(), ContainsSubstring("ncclSend failed with NCCL error 4: "));
  }
  nccl::check(ncclInProgress, "ncclGroupEnd");
}

TEST_CASE("a variable that the launcher does not set is named", "[nccl][bootstrap]") {
  const environment rank("RANK", nullptr), size("WORLD_SIZE", nullptr),
      address("MASTER_ADDR", nullptr), port("MASTER_PORT", nullptr);
  const auto lacks = [](const std::string& name) {
    CHECK_THROWS_WITH(nccl::meet_by_environment(),
                      ContainsSubstring("the environment lacks " + name + "; a launcher such as") &&
                          ContainsSubstring("nccl::meet_by_file or nccl::meet_over"));
  };
  lacks("WORLD_SIZE");
  for (const char* wrong : {"0", "-1", "two", "2 "}) {
    setenv("WORLD_SIZE", wrong, 1);
    CHECK_THROWS_WITH(nccl::meet_by_environment(),
                      ContainsSubstring("WORLD_SIZE must be an integer in [1, ") &&
                          ContainsSubstring(std::string("got \"") + wrong + "\""));
  }
  setenv("WORLD_SIZE", "2", 1);
  lacks("RANK");
  setenv("RANK", "2", 1);
  CHECK_THROWS_WITH(nccl::meet_by_environment(),
                    ContainsSubstring("RANK must be an integer in [0, 1], got \"2\""));
  setenv("RANK", "0", 1);
  lacks("MASTER_PORT");
  setenv("MASTER_PORT", "29500", 1);
  lacks("MASTER_ADDR");
  setenv("MASTER_ADDR", "", 1);
  lacks("MASTER_ADDR");
}

namespace {

/// Writes and reads on a board as each of `size` ranks, which `meet(rank)` brings together.
template <class Meet>
void speak(int size, Meet meet) {
  std::vector<std::string> heard(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < size; ++rank)
      ranks.emplace_back([&, rank] {
        std::string& text = heard[static_cast<std::size_t>(rank)];
        try {
          nccl::meeting here = meet(rank);
          here.timeout = 20s;
          for (const auto& each :
               nccl::detail::gather_words(here, "greetings", "rank " + std::to_string(here.rank)))
            text += each + ";";
          // Rank 0, who keeps the board, leaves last.
          static_cast<void>(nccl::detail::gather_words(here, "farewell", ""));
          if (here.rank == 0) std::this_thread::sleep_for(200ms);
        } catch (const std::exception& problem) {
          text = problem.what();
        }
      });
  }
  std::string all;
  for (int rank = 0; rank < size; ++rank) all += "rank " + std::to_string(rank) + ";";
  for (const std::string& each : heard) CHECK(each == all);
}

std::filesystem::path meeting_file(const std::string& name) {
  return std::filesystem::temp_directory_path() /
         ("bluefog_meeting_" + name + std::to_string(getpid()));
}

}  // namespace

TEST_CASE("ranks meet by way of a file", "[nccl][bootstrap]") {
  const auto file = meeting_file("");
  speak(4, [&](int rank) { return nccl::meet_by_file(file, rank, 4); });
  std::filesystem::remove(file);
  CHECK_THROWS_WITH(nccl::meet_by_file("/nonexistent/folder/file", 0, 2),
                    ContainsSubstring("rank 0 cannot write"));
  CHECK_THROWS_WITH(nccl::meet_by_file(file, 2, 2), ContainsSubstring("must be in [0, 2), got 2"));
}

TEST_CASE("ranks meet by way of a file again while others still have the first board",
          "[nccl][bootstrap]") {
  const auto file = meeting_file("again_");
  for (int round = 0; round < 3; ++round)
    speak(3, [&](int rank) {
      auto here = nccl::meet_by_file(file, rank, 3);
      if (nccl::detail::count_meeting(here) != round + 1) throw error("another board");
      return here;
    });
  speak(2, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(100ms);  // the others see what the three have left
    auto here = nccl::meet_by_file(file, rank, 2);
    if (nccl::detail::count_meeting(here) != 1) throw error("the board of three ranks");
    return here;
  });
  std::filesystem::remove(file);
}

TEST_CASE("a file that an earlier job has left misleads nobody, whoever has its port now",
          "[nccl][bootstrap]") {
  const auto file = meeting_file("left_");
  std::uint16_t port = 0;
  {
    const nccl::board_server gone(std::uint16_t{0}, "gone for 2 ranks");
    std::ofstream(file) << nccl::detail::board_address(gone);
    port = gone.port();
  }
  const nccl::board_server other(port, "another job's for 2 ranks");
  {
    const environment impatient("BLUEFOG_TIMEOUT", "0.1");
    CHECK_THROWS_WITH(
        nccl::meet_by_file(file, 1, 2),
        ContainsSubstring("rank 0 was not found through the file") &&
            ContainsSubstring("somebody else answers on port " + std::to_string(port)));
  }
  speak(2, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(100ms);
    return nccl::meet_by_file(file, rank, 2);
  });
  std::filesystem::remove(file);
}

TEST_CASE("ranks meet by way of another communicator", "[nccl][bootstrap]") {
  run_threads(3, [](communicator<thread_backend>& comm) {
    nccl::meeting here = nccl::meet_over(comm);
    const auto all = nccl::detail::gather_words(here, "names", std::to_string(comm.rank()));
    if (all != std::vector<std::string>{"0", "1", "2"}) throw error("ranks heard something else");
    barrier(comm);
  });
}

TEST_CASE("ranks meet at a port, and again there while others still have the first board",
          "[nccl][bootstrap]") {
  const auto port = nccl::port_of(nccl::listen_on(0));
  for (int round = 0; round < 3; ++round)
    speak(3, [&](int rank) {
      auto here = nccl::detail::meet_at("127.0.0.1", port, rank, 3);
      if (nccl::detail::count_meeting(here) != round + 1) throw error("another board");
      return here;
    });
}

TEST_CASE("what ranks tell each other beside NCCL ends with the board, without an error",
          "[nccl][mailbox]") {
  auto server = std::make_unique<nccl::board_server>(std::uint16_t{0});
  const auto port = server->port();
  std::shared_ptr<nccl::board> home = nccl::detail::open_board(std::move(server));
  std::optional<nccl::mailbox> first(std::in_place, home, "group", 0, 2);
  const std::optional place = nccl::detail::board_place{"127.0.0.1", port};
  nccl::mailbox second(nccl::detail::reach_board([&] { return place; }, 1s, "the test"), "group", 1,
                       2);
  const auto wait_for = [](auto look) {
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    auto found = look();
    while (!found && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(5ms);
      found = look();
    }
    return found;
  };
  second.post(4);
  const auto heard = wait_for([&] { return first->collect(); });
  REQUIRE(heard);
  CHECK(heard->sender == 1);
  CHECK(heard->number == 4);
  CHECK_FALSE(second.end());
  first->tell_end("it rains");
  CHECK(wait_for([&] { return second.end(); }) == "rank 0 has ended the communicator: it rains");
  first.reset();
  home.reset();
  second.post(5);
  std::this_thread::sleep_for(100ms);  // until it is time to read the board again
  CHECK_FALSE(second.collect());
}

TEST_CASE("rank 0 that does not come is a timeout_error", "[nccl][bootstrap]") {
  const environment impatient("BLUEFOG_TIMEOUT", "0.1");
  CHECK_THROWS_AS(nccl::meet_by_file("/tmp/bluefog_nobody_wrote_this", 1, 2), timeout_error);
}

TEST_CASE("a signal is not taken for the end of a connection", "[nccl][bootstrap]") {
  std::array<int, 2> ends{};
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
  const nccl::unique_socket reading(ends[0]), writing(ends[1]);
  nccl::set_patience(reading, 20s);
  using action = struct sigaction;
  action before{}, ignoring{};
  ignoring.sa_handler = [](int) {};
  REQUIRE(sigaction(SIGUSR1, &ignoring, &before) == 0);
  std::optional<std::string> received;
  std::thread reader([&] { received = nccl::receive_all(reading, 8); });
  for (int k = 0; k < 5; ++k) {
    std::this_thread::sleep_for(20ms);
    pthread_kill(reader.native_handle(), SIGUSR1);
    CHECK(nccl::send_all(writing, "a"));
  }
  CHECK(nccl::send_all(writing, "bcd"));
  reader.join();
  sigaction(SIGUSR1, &before, nullptr);
  CHECK(received == "aaaaabcd");
}

TEST_CASE("whoever speaks otherwise to the board is not answered, and holds up nobody",
          "[nccl][bootstrap]") {
  auto server = std::make_unique<nccl::board_server>(std::uint16_t{0});
  const auto stranger = nccl::connect_to("127.0.0.1", server->port());
  REQUIRE(stranger);
  CHECK(nccl::send_all(*stranger, "GET / HTTP/1.1\r\n\r\n"));
  CHECK_FALSE(nccl::receive_framed(*stranger));
  const auto board = nccl::detail::open_board(std::move(server));
  board->put("key", "value = anything");
  CHECK(board->look("key") == "value = anything");
  CHECK(board->look("no key") == std::nullopt);
  board->put("key", "another value");
  board->put("key 2", "");
  board->put("ke", "no");
  CHECK(board->look_for_all("key") == nccl::board::texts{{"", "another value"}, {" 2", ""}});
  CHECK(board->look_for_all("nothing").empty());
  CHECK_THROWS_AS(board->wait("no key", std::chrono::steady_clock::now(), "nobody"), timeout_error);
}
