// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include <bluefog/collective.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/topology.hpp>

#include "nccl/support.hpp"

using namespace bluefog;
using namespace bluefog_test;
using namespace std::chrono_literals;

namespace {

using nccl_communicator = communicator<nccl_backend>;

/// An array in memory of the current device.
template <class T>
class device_array {
 public:
  explicit device_array(std::vector<T> values) : size_(values.size()) {
    void* memory = nullptr;
    nccl::check(cudaMalloc(&memory, size_ * sizeof(T)), "cudaMalloc");
    data_ = static_cast<T*>(memory);
    std::memcpy(data_, values.data(), size_ * sizeof(T));  // the stand-in's devices are the host
  }
  device_array(const device_array&) = delete;
  device_array& operator=(const device_array&) = delete;
  ~device_array() { static_cast<void>(cudaFree(data_)); }

  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] T* data() { return data_; }
  [[nodiscard]] const T* data() const { return data_; }
  [[nodiscard]] T* begin() { return data_; }
  [[nodiscard]] T* end() { return data_ + size_; }
  [[nodiscard]] const T* begin() const { return data_; }
  [[nodiscard]] const T* end() const { return data_ + size_; }

 private:
  std::size_t size_;
  T* data_ = nullptr;
};

std::string on_two_ranks(void (*body)(nccl_communicator&), communicator_options options = {}) {
  return run_nccl_ranks(2, body, options);
}

/// \return what a launcher would give as MASTER_PORT; rank 0 listens on the one after it.
std::string free_master_port() {
  return std::to_string(nccl::port_of(nccl::listen_on(0)) - 1);
}

/// Starts this program as two ranks with the hidden test case below. \return whether both passed.
bool launch_two(const std::string& variables, int attempts = 3) {
  const std::string rank = " WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=" + free_master_port() +
                           " BLUEFOG_TIMEOUT=30 " + variables + " \"$(readlink /proc/" +
                           std::to_string(getpid()) + "/exe)\" '[launched]' 1>&2";
  const std::string command =
      "RANK=1" + rank + " & RANK=0" + rank + "; first=$?; wait $! && exit $first; exit 1";
  // Somebody may have taken the port meanwhile.
  return std::system(command.c_str()) == 0 || (attempts > 1 && launch_two(variables, attempts - 1));
}

}  // namespace

TEST_CASE("an operation on device memory waits for what its caller's stream was given before",
          "[nccl][stream]") {
  CHECK(on_two_ranks([](nccl_communicator& comm) {
          const nccl::device_scope scope(comm.transport().device());
          const auto stream = nccl::make_stream();
          comm.transport().caller_stream(stream.get());
          device_array<float> x(std::vector<float>(100, -1));
          const auto real = stand_in::stream_of(stream.get(), "test");
          real->give([&] {
            std::this_thread::sleep_for(50ms);
            for (float& each : x) each = static_cast<float>(comm.rank());
          });
          auto started = neighbor_allreduce_nonblocking(comm, std::span(x), std::span(x),
                                                        topology::fully_connected(comm.size()));
          started.wait();
          for (const float each : x) require_equal(each, 0.5F);
        }) == "");
}

TEST_CASE("operations on host and on device memory follow each other in any mix",
          "[nccl][staging]") {
  CHECK(on_two_ranks([](nccl_communicator& comm) {
          const nccl::device_scope scope(comm.transport().device());
          device_array<double> device(std::vector<double>(33, comm.rank()));
          std::vector<double> host(33, 10.0 + comm.rank());
          for (int round = 0; round < 5; ++round) {
            auto first = neighbor_allreduce_nonblocking(comm, std::span(device), std::span(device),
                                                        topology::ring(comm.size()));
            auto second = allreduce_nonblocking(comm, std::span(host), std::span(host));
            second.wait();
            first.wait();
          }
          require_equal(device.data()[32], 0.5);
          require_equal(host[32], 10.5);
        }) == "");
}

TEST_CASE("a failure that NCCL reports later reaches the waiting call, on every rank",
          "[nccl][errors]") {
  for (const bool device : {false, true}) {
    stand_in::all_memory_is_device(device);
    std::atomic<int> told = 0;
    std::barrier ready(2);
    const auto problem = run_nccl_ranks(
        2,
        [&](nccl_communicator& comm) {
          ready.arrive_and_wait();
          if (comm.rank() == 0) stand_in::fail_communication(1, ncclSystemError);
          std::vector<float> x(8, 1);
          const auto text = require_throws<error>([&] {
            for (int i = 0; i < 20; ++i) neighbor_allreduce(comm, x, x, topology::ring(2));
          });
          require_contains(text, "NCCL error");
          ++told;
          // What comes later fails for the same reason.
          require_contains(require_throws<transport_error>([&] { allreduce(comm, x, x); }),
                           "the communicator was aborted");
        },
        {});
    CHECK(problem == "");
    CHECK(told == 2);
  }
  stand_in::all_memory_is_device(false);
  stand_in::fail_communication(0, 0);
}

TEST_CASE("a rank that does not answer is a timeout_error, after which the memory is free",
          "[nccl][errors]") {
  for (const bool device : {false, true}) {
    stand_in::all_memory_is_device(device);
    const auto problem =
        run_nccl_ranks(2,
                       [](nccl_communicator& comm) {
                         if (comm.rank() == 1) {
                           std::this_thread::sleep_for(600ms);
                           return;
                         }
                         auto x = std::make_unique<std::vector<float>>(1000, 1.0F);
                         require_throws<timeout_error>([&] { pair_gossip(comm, *x, *x, 1); });
                         x.reset();
                       },
                       {.timeout = 200ms});
    CHECK(problem == "");
  }
  stand_in::all_memory_is_device(false);
}

TEST_CASE("whoever waits for the device's work is told when it cannot come", "[nccl][errors]") {
  std::atomic<bool> go = false;
  std::barrier ready(2);
  const auto problem = run_nccl_ranks(
      2,
      [&](nccl_communicator& comm) {
        nccl_backend& transport = comm.transport();
        ready.arrive_and_wait();
        {
          const nccl::device_scope scope(transport.device());
          stand_in::stream_of(transport.stream(), "test")->give([&] {
            while (!go) std::this_thread::sleep_for(1ms);
          });
        }
        if (comm.rank() == 0) {
          require_contains(require_throws<timeout_error>([&] { transport.synchronize(); }),
                           "rank 0 waits in vain for the work on its device");
        } else {
          std::this_thread::sleep_for(150ms);  // its own time is over later than rank 0's
          require_contains(require_throws<peer_error>([&] { transport.synchronize(); }),
                           "rank 0 has ended the communicator");
        }
        require_throws<transport_error>([&] { transport.synchronize(); });
        ready.arrive_and_wait();
        go = true;
        const nccl::device_scope scope(transport.device());
        while (nccl::is_not_ready(cudaStreamQuery(transport.stream()))) std::this_thread::yield();
      },
      {.timeout = 300ms});
  CHECK(problem == "");
}

TEST_CASE("operations of many sizes, over and over, take their memory from each other",
          "[nccl][memory]") {
  for (const bool device : {false, true}) {
    INFO((device ? "device" : "host") << " memory");
    stand_in::all_memory_is_device(device);
    constexpr int ranks = 4;
    std::barrier together(ranks);
    std::atomic<int> first = 0, last = 0;
    const auto problem =
        run_nccl_ranks(ranks,
                       [&](nccl_communicator& comm) {
                         std::vector<std::vector<float>> buckets;
                         for (double count = 1000; buckets.size() < 20; count *= 1.3)
                           buckets.emplace_back(static_cast<std::size_t>(count), 1.0F);
                         for (int step = 0; step < 3; ++step) {
                           std::vector<request<void>> started;
                           for (auto& each : buckets)
                             started.push_back(neighbor_allreduce_nonblocking(
                                 comm, each, each, topology::fully_connected(ranks)));
                           for (auto& each : started) each.wait();
                           together.arrive_and_wait();
                           if (comm.rank() == 0)
                             (step == 0 ? first : last) = stand_in::memory_calls();
                           together.arrive_and_wait();
                         }
                       },
                       {});
    CHECK(problem == "");
    CHECK(last == first);
  }
  stand_in::all_memory_is_device(false);
}

TEST_CASE("a rank that is missing at the start is a timeout_error that says so",
          "[nccl][bootstrap]") {
  const nccl::meeting alone{
      .rank = 0, .size = 2, .words = std::make_shared<nccl::local_board>(), .timeout = 50ms};
  CHECK_THROWS_WITH(nccl_backend(alone), ContainsSubstring("rank 1 did not come in time"));
  CHECK(stand_in::broken_rules() == "");
}

// The stand-in's ranks are threads of one process: processes meet, and agree on their devices, but
// do not communicate.
TEST_CASE("a rank that a launcher has started", "[.][launched]") {
  const int own = std::stoi(std::getenv("RANK"));
  const char* const file = std::getenv("BLUEFOG_TEST_MEETING");
  const nccl::meeting here =
      file != nullptr ? nccl::meet_by_file(file, own, 2) : nccl::meet_by_environment();
  CHECK(here.rank == own);
  CHECK(here.size == 2);
  if (std::getenv("LOCAL_RANK") == nullptr) {
    const nccl::group all = nccl::make_group(here);
    CHECK(all.machines == std::vector{0, 0});
    CHECK(all.device == here.rank);
  } else {
    CHECK_THROWS_WITH(nccl::make_group(here), ContainsSubstring("ranks 0 and 1 use the same") &&
                                                  ContainsSubstring("GPU-03"));
  }
  // Rank 0, who keeps the board, leaves last.
  if (here.rank == 1)
    here.words->put("rank 1", "is done");
  else
    static_cast<void>(here.words->wait(
        "rank 1", std::chrono::steady_clock::now() + std::chrono::seconds(30), "rank 1"));
}

TEST_CASE("two processes meet by what the environment says, and agree on their devices",
          "[nccl][bootstrap]") {
  CHECK(launch_two(""));
  CHECK(launch_two("LOCAL_RANK=3"));
}

TEST_CASE("two processes meet by a file", "[nccl][bootstrap]") {
  const auto file =
      std::filesystem::temp_directory_path() / ("bluefog_meeting_" + std::to_string(getpid()));
  CHECK(launch_two("BLUEFOG_TEST_MEETING=" + file.string()));
  CHECK(launch_two("BLUEFOG_TEST_MEETING=" + file.string()));  // where the file of others is
  std::filesystem::remove(file);
}

TEST_CASE("ranks that met by the environment communicate", "[nccl][bootstrap]") {
  const environment size("WORLD_SIZE", "3");
  const environment address("MASTER_ADDR", "127.0.0.1");
  const environment port("MASTER_PORT", free_master_port().c_str());
  std::vector<nccl::meeting> meetings;
  for (const char* each : {"0", "1", "2"}) {
    const environment rank("RANK", each);
    meetings.push_back(nccl::meet_by_environment());
  }
  std::vector<std::string> problems(meetings.size());
  {
    std::vector<std::jthread> threads;
    for (const nccl::meeting& each : meetings)
      threads.emplace_back([&] {
        try {
          communicator<nccl_backend> comm(each);
          require_equal(comm.rank(), each.rank);
          std::vector<double> x(5, 3.0 * comm.rank());
          allreduce(comm, x, x);
          require_near(x.back(), 3, 1e-12);
        } catch (const std::exception& problem) {
          problems[static_cast<std::size_t>(each.rank)] = problem.what();
        }
      });
  }
  for (const std::string& each : problems) CHECK(each == "");
  CHECK(stand_in::broken_rules() == "");
}

TEST_CASE("a program that is started without others is a communicator of one rank",
          "[nccl][bootstrap]") {
  const environment size("WORLD_SIZE", "1");
  const environment rank("RANK", "0");
  communicator<nccl_backend> comm;
  CHECK(comm.size() == 1);
  std::vector<float> x{1, 2};
  allreduce(comm, x, x);
  CHECK(x == std::vector<float>{1, 2});
}

TEST_CASE("two ranks on one device are refused with their numbers, unless that is allowed",
          "[nccl][bootstrap]") {
  const environment local("LOCAL_RANK", "3");
  const auto body = [](nccl_communicator&) {};
  const auto refused = run_nccl_ranks(3, body, {});
  CHECK_THAT(refused, ContainsSubstring("ranks 0 and 1 use the same device"));
  CHECK_THAT(refused, ContainsSubstring("GPU-03"));
  CHECK_THAT(refused, ContainsSubstring("BLUEFOG_ALLOW_SHARED_DEVICE=1"));
  const environment allowed("BLUEFOG_ALLOW_SHARED_DEVICE", "1");
  CHECK_THAT(run_nccl_ranks(3, body, {.timeout = 1s}), ContainsSubstring("NCCL error"));
  CHECK(stand_in::broken_rules() == "");
}

TEST_CASE("more ranks on a host than devices are refused on every rank", "[nccl][bootstrap]") {
  const auto refused = run_nccl_ranks(stand_in::devices + 1, [](nccl_communicator&) {}, {});
  CHECK_THAT(refused, ContainsSubstring("only 16 are visible"));
  CHECK(std::count(refused.begin(), refused.end(), '\n') == stand_in::devices + 1);
}

TEST_CASE("another NCCL than was compiled for is refused on all ranks, unless it is a newer one",
          "[nccl][bootstrap]") {
  const auto problem_with = [](int code) {
    stand_in::nccl_version(code);  // on one rank
    return run_nccl_ranks(3, [](nccl_communicator&) {}, {});
  };
  const auto refused = [&](int code, const std::string& text) {
    const auto problem = problem_with(code);
    INFO(problem);
    std::size_t told = 0;
    for (auto at = problem.find(text); at != std::string::npos; at = problem.find(text, at + 1))
      ++told;
    CHECK(told == 3);
  };
  const auto but = [](int major, int minor) {
    return concat("compiled for NCCL ", NCCL_MAJOR, ".", NCCL_MINOR, ".", NCCL_PATCH, ", but NCCL ",
                  major, ".", minor, ".5 was loaded");
  };
  refused(NCCL_VERSION_CODE - 1, "but NCCL ");
  refused(10000 * (NCCL_MAJOR - 1) + 9905, but(NCCL_MAJOR - 1, 99));
  refused(10000 * (NCCL_MAJOR + 1) + 105, but(NCCL_MAJOR + 1, 1));
  CHECK(problem_with(NCCL_VERSION_CODE + 1) == "");
  CHECK(problem_with(NCCL_VERSION_CODE + 100) == "");
}

TEST_CASE("ranks take no context on a device that is not theirs", "[nccl][devices]") {
  const auto operations = [](nccl_communicator& comm, bool device) {
    std::vector<float> x(40, 1), y(40);
    require_equal(comm.transport().on_device(x.data()), device);
    auto pending = neighbor_allreduce_nonblocking(comm, x, y, topology::ring(2));
    allreduce_nonblocking(comm, x, x, reduce_op::max).wait();
    pending.wait();
    neighbor_allreduce(comm, x, y, topology::ring(2));
    broadcast(comm, x, 0);
    auto copy = comm.duplicate();
    barrier(copy);
  };
  for (const bool device : {false, true}) {
    INFO((device ? "device" : "host") << " memory");
    stand_in::all_memory_is_device(device);
    std::vector<int> used;
    std::barrier together(3);
    CHECK(
        run_nccl_ranks(3,
                       [&](nccl_communicator& comm) {
                         auto part = comm.split(comm.rank() == 0 ? 0 : 1);
                         together.arrive_and_wait();
                         // As in a process of its own: nobody has used device 0, and a thread
                         // begins there.
                         if (comm.rank() == 0) stand_in::forget_contexts();
                         together.arrive_and_wait();
                         if (comm.rank() > 0)
                           std::async(std::launch::async, [&] { operations(part, device); }).get();
                         together.arrive_and_wait();
                         if (comm.rank() == 0) used = stand_in::contexts();
                         together.arrive_and_wait();
                       },
                       {}) == "");
    CHECK(used == std::vector{1, 2});
  }
  stand_in::all_memory_is_device(false);
}

TEST_CASE("a thread's device is again the current one where it has been used", "[nccl][devices]") {
  std::jthread([] {
    const auto current = [] { return stand_in::current_device(); };
    stand_in::forget_contexts();
    { const nccl::device_scope scope(4); }
    CHECK(current() == 4);
    nccl::check(cudaSetDevice(2), "cudaSetDevice");
    {
      const nccl::device_scope scope(4);
      CHECK(current() == 4);
    }
    CHECK(current() == 2);
    CHECK(stand_in::contexts() == std::vector{2, 4});
  }).join();
}

TEST_CASE("what a stream still does when its communicator ends is waited for, not left behind",
          "[nccl][lifetime]") {
  const int before = stand_in::living_objects();
  CHECK(on_two_ranks([](nccl_communicator& comm) {
          barrier(comm);
          const nccl::device_scope scope(comm.transport().device());
          stand_in::stream_of(comm.transport().stream(), "a test")->give([] {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
          });
        }) == "");
  CHECK(stand_in::living_objects() == before);
}

TEST_CASE("communicators made from one another, and many in turn, leave nothing behind",
          "[nccl][lifetime]") {
  const int before = stand_in::living_objects();
  for (int round = 0; round < 20; ++round)
    CHECK(run_nccl_ranks(3,
                         [](nccl_communicator& comm) {
                           auto parts = comm.split(comm.rank() % 2);
                           auto copy = parts.duplicate();
                           std::vector<float> x(5, 1);
                           std::vector<float> y(5, 1);
                           auto pending = allreduce_nonblocking(copy, y, y);
                           allreduce(comm, x, x);
                           pending.wait();
                         },
                         {}) == "");
  CHECK(stand_in::living_objects() == before);
}

TEST_CASE("an exception on one rank ends the others' operations too", "[nccl][errors]") {
  const auto problem =
      run_nccl_ranks(3,
                     [](nccl_communicator& comm) {
                       if (comm.rank() == 1) {
                         barrier(comm);
                         throw rank_failure("planned");
                       }
                       std::vector<float> x(5, 1);
                       require_throws<error>([&] {
                         barrier(comm);  // may be over for rank 1 while it is not for this one
                         allreduce(comm, x, x);
                       });
                     },
                     {});
  CHECK(problem == "planned\n");
}

TEST_CASE("two threads may use one communicator's requests and errors at once", "[nccl][threads]") {
  CHECK(on_two_ranks([](nccl_communicator& comm) {
          auto other = comm.duplicate();
          std::jthread beside([&] {
            std::vector<float> y(50, 1);
            for (int i = 0; i < 30; ++i) allreduce(other, y, y);
          });
          std::vector<float> x(50, 1);
          for (int i = 0; i < 30; ++i) {
            auto started = neighbor_allreduce_nonblocking(comm, x, x, topology::ring(2));
            while (!started.ready()) std::this_thread::yield();
            started.wait();
          }
        }) == "");
}
