// SPDX-License-Identifier: Apache-2.0
//
// What the communication engine costs beside the program's own work: the share of a core that its
// thread takes while nothing is outstanding, and the time from the call of an operation to the
// first call of the transport. BlueFog and Horovod look for new work every 500 us and 1000 us; the
// aims are at most 1 % of a core, and at most 20 us in the median.
//
//   engine_dispatch [SECONDS]
//
// The transport is one rank of two that notes when it is called, and whose messages arrive at once.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <time.h>

#include <bluefog/backend.hpp>
#include <bluefog/communicator.hpp>

#include "foreign_load.hpp"

namespace {

using clock_type = std::chrono::steady_clock;

struct arrived_operation {
  [[nodiscard]] static bool ready() { return true; }
  void abandon() noexcept {}
  [[nodiscard]] static std::vector<int> waiting_for() { return {}; }
};

/// Notes the time of its last call.
class noting_backend {
 public:
  using operation_type = arrived_operation;
  static constexpr std::string_view name = "noting";
  static constexpr bluefog::memory_space space = bluefog::memory_space::host;

  class exchange_type {
   public:
    explicit exchange_type(clock_type::time_point& called) : called_(&called) {}
    void send(bluefog::const_buffer, int) {}
    void receive(bluefog::mutable_buffer, int) {}
    [[nodiscard]] arrived_operation submit() && {
      *called_ = clock_type::now();
      return {};
    }

   private:
    clock_type::time_point* called_;
  };

  explicit noting_backend(clock_type::time_point& called) : called_(&called) {}
  noting_backend(noting_backend&&) = default;
  noting_backend& operator=(noting_backend&&) = default;
  noting_backend(const noting_backend&) = delete;
  noting_backend& operator=(const noting_backend&) = delete;
  ~noting_backend() = default;

  [[nodiscard]] int rank() const noexcept { return 0; }
  [[nodiscard]] int size() const noexcept { return 2; }
  [[nodiscard]] int machine() const noexcept { return 0; }
  [[nodiscard]] bool any_thread() const noexcept { return true; }
  [[nodiscard]] exchange_type exchange(bluefog::message_tag) { return exchange_type(*called_); }
  [[nodiscard]] noting_backend subset(std::span<const int>, std::uint64_t) {
    return noting_backend(*called_);
  }

 private:
  clock_type::time_point* called_;
};

bluefog::task send_task(bluefog::operation_context<noting_backend> context,
                        bluefog::const_buffer in) {
  auto exchange = context.exchange();
  exchange.send(in, 1);
  auto transfer = std::move(exchange).submit();
  co_await transfer;
}

/// Processor time of all threads of this process, in seconds.
double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct row {
  const char* name;
  double value;
  const char* unit;
  double aim;
};

void print(const row& each) {
  std::printf("%-34s %10.3f %-10s aim %6.1f  %s\n", each.name, each.value, each.unit, each.aim,
              each.value <= each.aim ? "met" : "MISSED");
}

void print_json(const row& each, const std::string& foreign) {
  std::printf(
      "{\"id\": \"B22\", \"benchmark\": \"engine_dispatch\", \"row\": \"%s\", \"value\": %.4f, "
      "\"unit\": \"%s\", \"aim\": %.1f, \"met\": %s, \"foreign_load\": %s}\n",
      each.name, each.value, each.unit, each.aim, each.value <= each.aim ? "true" : "false",
      foreign.c_str());
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 2.0;
  const foreign_load others;
  clock_type::time_point called;
  bluefog::communicator<noting_backend> comm{noting_backend(called)};
  const std::vector<float> values(1000, 1.0F);
  const auto in = bluefog::as_buffer(values);
  const auto make = [&](auto context) { return send_task(context, in); };
  const bluefog::call_description call{.operation = "send"};

  // The first asynchronous operation starts the thread.
  bluefog::request<void>(comm.driver(), comm.start(call, make)).wait();
  const double before = processor_seconds();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const double idle = 100 * (processor_seconds() - before) / seconds;

  constexpr int repeats = 5000;
  std::vector<double> nonblocking, blocking, after_a_pause;
  const auto microseconds = [&](clock_type::time_point start) {
    return std::chrono::duration<double, std::micro>(called - start).count();
  };
  const auto start_one = [&](std::vector<double>& times) {
    const auto start = clock_type::now();
    bluefog::request<void> pending(comm.driver(), comm.start(call, make));
    pending.wait();
    times.push_back(microseconds(start));
  };
  for (int i = 0; i < repeats; ++i) {
    start_one(nonblocking);
    const auto start = clock_type::now();
    comm.run(call, make);
    blocking.push_back(microseconds(start));
  }
  for (int i = 0; i < 200; ++i) {  // the thread has gone to sleep, and the caches have cooled
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    start_one(after_a_pause);
  }

  const row rows[] = {{"idle communication thread", idle, "% of core", 1},
                      {"call to transport, nonblocking", median(nonblocking), "us", 20},
                      {"call to transport, blocking", median(blocking), "us", 20},
                      {"call to transport, after 1 ms idle", median(after_a_pause), "us", 20}};
  for (const row& each : rows) print(each);
  const std::string foreign = others.report();
  for (const row& each : rows) print_json(each, foreign);
  return 0;
}
