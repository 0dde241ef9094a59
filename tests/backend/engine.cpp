// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/topology.hpp>

#include "support.hpp"

using namespace std::chrono_literals;
using namespace bluefog;
using bluefog_test::comes_true;
using bluefog_test::counted_owner;
using bluefog_test::noting_task;
using bluefog_test::require;
using bluefog_test::require_contains;
using bluefog_test::require_equal;
using bluefog_test::require_throws;
using bluefog_test::swap_with;

namespace {

using thread_communicator = communicator<thread_backend>;

#ifdef BLUEFOG_TEST_SANITIZED
constexpr int many = 20'000;
#else
constexpr int many = 100'000;
#endif

[[nodiscard]] int sum_of_ranks(int size) {
  return size * (size - 1) / 2;
}

/// Threads that may make progress only where the caller is.
class foreground_backend {
 public:
  using operation_type = thread_backend::operation_type;
  static constexpr std::string_view name = "foreground";
  static constexpr memory_space space = memory_space::host;

  explicit foreground_backend(thread_backend inner) : inner_(std::move(inner)) {}
  [[nodiscard]] int rank() const noexcept { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept { return inner_.size(); }
  [[nodiscard]] int machine() const noexcept { return 0; }
  [[nodiscard]] bool any_thread() const noexcept { return false; }
  [[nodiscard]] auto exchange(message_tag tag) { return inner_.exchange(tag); }
  [[nodiscard]] foreground_backend subset(std::span<const int> members, std::uint64_t serial) {
    return foreground_backend(inner_.subset(members, serial));
  }

 private:
  thread_backend inner_;
};

/// A transport of two ranks whose messages write to the receiver's memory long after they were
/// given up, as hardware does.
class stubborn_backend {
 public:
  struct transfer {
    std::vector<mutable_buffer> targets;
    std::atomic<bool> abandoned = false;
    std::atomic<bool> over = false;
  };
  class operation {
   public:
    operation() = default;
    explicit operation(std::shared_ptr<transfer> it) : transfer_(std::move(it)) {}
    [[nodiscard]] bool ready() const { return !transfer_ || transfer_->over; }
    void abandon() noexcept {
      if (transfer_) transfer_->abandoned = true;
    }
    [[nodiscard]] std::vector<int> waiting_for() const { return {1}; }

   private:
    std::shared_ptr<transfer> transfer_;
  };
  class exchange_type {
   public:
    explicit exchange_type(stubborn_backend& home) : home_(&home) {}
    void send(const_buffer, int) {}
    void receive(mutable_buffer out, int) { started_->targets.push_back(out); }
    [[nodiscard]] operation submit() && {
      if (home_->stuck) {
        *home_->last = started_;
      } else {
        started_->over = true;
      }
      return operation(started_);
    }

   private:
    stubborn_backend* home_;
    std::shared_ptr<transfer> started_ = std::make_shared<transfer>();
  };

  using operation_type = operation;
  static constexpr std::string_view name = "stubborn";
  static constexpr memory_space space = memory_space::host;

  explicit stubborn_backend(std::shared_ptr<std::shared_ptr<transfer>> where)
      : last(std::move(where)) {}
  stubborn_backend(stubborn_backend&&) = default;
  stubborn_backend& operator=(stubborn_backend&&) = default;
  stubborn_backend(const stubborn_backend&) = delete;
  stubborn_backend& operator=(const stubborn_backend&) = delete;
  ~stubborn_backend() = default;

  [[nodiscard]] int rank() const noexcept { return 0; }
  [[nodiscard]] int size() const noexcept { return 2; }
  [[nodiscard]] int machine() const noexcept { return 0; }
  [[nodiscard]] bool any_thread() const noexcept { return true; }
  [[nodiscard]] exchange_type exchange(message_tag) { return exchange_type(*this); }
  [[nodiscard]] stubborn_backend subset(std::span<const int>, std::uint64_t) {
    return stubborn_backend(last);
  }

  std::shared_ptr<std::shared_ptr<transfer>> last;
  bool stuck = false;
};

/// Fails with `problem`, before or after an exchange with everybody.
template <backend Backend>
task failing_task(operation_context<Backend> context, std::exception_ptr problem, bool early) {
  if (early) std::rethrow_exception(problem);
  auto gathering = gather_equal(context, std::vector<int>(1), std::make_shared<std::vector<int>>());
  co_await std::move(gathering);
  std::rethrow_exception(problem);
}

/// Is over as soon as another thread than the caller's asks.
struct elsewhere {
  std::thread::id caller;
  [[nodiscard]] bool ready() const { return std::this_thread::get_id() != caller; }
  void abandon() noexcept {}
  [[nodiscard]] std::vector<int> waiting_for() const { return {}; }
};

/// Keeps the communication thread, and so all progress but a caller's own, until it is let go.
template <backend Backend>
task holding_task(operation_context<Backend>, elsewhere thread, std::atomic<bool>* held,
                  const std::atomic<bool>* let_go, std::atomic<bool>* in_vain) {
  co_await thread;
  *held = true;
  *in_vain = !comes_true(*let_go);
}

}  // namespace

static_assert(backend<foreground_backend>);
static_assert(backend<stubborn_backend>);

RANKS_TEST("many operations in flight end with their own values, whatever order they are waited in",
           "[backend][engine]") {
  constexpr int count = 200;
  std::vector<std::vector<int>> values;
  std::vector<request<void>> requests;
  for (int i = 0; i < count; ++i)
    values.emplace_back(static_cast<std::size_t>(1 + i % 3 * 900), comm.rank() + i);
  for (auto& each : values)
    requests.push_back(allreduce_nonblocking(comm, each, each, reduce_op::sum));
  std::vector<int> order(count);
  for (int i = 0; int& each : order) each = i++;
  std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(comm.rank())));
  for (const int i : order) {
    requests[static_cast<std::size_t>(i)].wait();
    require_equal(values[static_cast<std::size_t>(i)].back(),
                  sum_of_ranks(comm.size()) + i * comm.size());
  }
}

RANKS_TEST("a blocking call comes after what is outstanding", "[backend][engine]") {
  std::vector<int> first(3, comm.rank()), second(3, 1);
  auto pending = allreduce_nonblocking(comm, first, first, reduce_op::sum);
  allreduce(comm, second, second, reduce_op::sum);
  require_equal(second[0], comm.size());
  pending.wait();
  require_equal(first[2], sum_of_ranks(comm.size()));
}

RANKS_TEST("communicators with operations in flight can be split, and share the engine",
           "[backend][engine]") {
  std::vector<int> whole(2000, 1), part(5, 1), twin(700, comm.rank());
  auto on_all = allreduce_nonblocking(comm, whole, whole, reduce_op::sum);
  auto half_of_ranks = comm.split(comm.rank() % 2);
  auto on_half = allreduce_nonblocking(half_of_ranks, part, part, reduce_op::sum);
  auto copy = comm.duplicate();
  require(copy.driver() == comm.driver());
  auto on_copy = allreduce_nonblocking(copy, twin, twin, reduce_op::sum);
  auto machine = comm.local();
  auto leaders = comm.leaders();
  require_equal(leaders.has_value(), comm.local_rank() == 0);
  on_copy.wait();
  on_half.wait();
  on_all.wait();
  require_equal(whole[7], comm.size());
  require_equal(part[0], half_of_ranks.size());
  require_equal(twin[3], sum_of_ranks(comm.size()));
}

RANKS_TEST("a request outlives its communicator, and a dropped one is waited for",
           "[backend][engine]") {
  std::vector<int> kept(100, comm.rank()), dropped(100, 1);
  auto pending = [&] {
    auto copy = comm.duplicate();
    { const auto forgotten = allreduce_nonblocking(copy, dropped, dropped, reduce_op::sum); }
    require_equal(dropped[9], comm.size());
    return allreduce_nonblocking(copy, kept, kept, reduce_op::sum);
  }();
  require(pending.ready());  // the communicator has waited for it
  pending.wait();
  require_equal(kept[9], sum_of_ranks(comm.size()));
  require_throws<usage_error>([&] { pending.wait(); });
  require_throws<usage_error>([&] { static_cast<void>(pending.ready()); });
}

RANKS_TEST("a name is in use until somebody has waited for it", "[backend][engine]") {
  std::vector<int> x(10, 1), y(10, 1);
  const auto before = comm.statistics().operations;
  auto first = allreduce_nonblocking(comm, x, x, reduce_op::sum, {.name = "x"});
  const auto text = require_throws<usage_error>(
      [&] { allreduce_nonblocking(comm, y, y, reduce_op::sum, {.name = "x"}); });
  require_contains(text, "\"x\"");
  require_throws<usage_error>([&] { allreduce(comm, y, y, reduce_op::sum, {.name = "x"}); });
  require_equal(comm.statistics().operations, before + 1);  // nothing has become of the others
  auto other = allreduce_nonblocking(comm, y, y, reduce_op::sum, {.name = "y"});
  first.wait();
  other.wait();
  require_equal(y[0], comm.size());
  allreduce(comm, y, y, reduce_op::max, {.name = "x"});
  allreduce(comm, y, y, reduce_op::max, {.name = "x"});
  { auto dropped = allreduce_nonblocking(comm, y, y, reduce_op::max, {.name = "x"}); }
  allreduce(comm, y, y, reduce_op::max, {.name = "x"});
  require_equal(x[9], comm.size());
}

RANKS_TEST("an operation that fails throws at its own wait, and later ones work",
           "[backend][engine]") {
  for (const bool early : {true, false}) {
    const auto fail_with = [&](auto problem, auto act) {
      const auto make = [&](auto context) {
        return failing_task(context, std::make_exception_ptr(problem), early);
      };
      act(make);
      std::vector<int> x(10, 1);
      allreduce(comm, x, x, reduce_op::sum);
      require_equal(x[5], comm.size());
    };
    const auto blocking = [&](auto make) { comm.run({.operation = "broken"}, make); };
    fail_with(mismatch_error("a is not b"), [&](auto make) {
      const auto text = require_throws<mismatch_error>([&] { blocking(make); });
      require_contains(text, "broken (operation ");
      require_contains(text, "): a is not b");
    });
    fail_with(transport_error("no route", 42), [&](auto make) {
      try {
        blocking(make);
        require(false, "nothing was thrown");
      } catch (const transport_error& problem) {
        require_equal(problem.code(), 42);
        require_contains(problem.what(), "broken (operation ");
      }
    });
    fail_with(peer_error("broken: said so itself"), [&](auto make) {
      require_equal(require_throws<peer_error>([&] { blocking(make); }),
                    std::string("broken: said so itself"));
    });
    fail_with(std::runtime_error("the user's"), [&](auto make) {
      std::vector<int> before(5, 1), after(5, 1);
      auto first = allreduce_nonblocking(comm, before, before, reduce_op::sum);
      request<void> middle(comm.driver(), comm.start({.operation = "broken", .name = "b"}, make));
      auto last = allreduce_nonblocking(comm, after, after, reduce_op::sum);
      last.wait();
      first.wait();
      require_equal(before[0] + after[0], 2 * comm.size());
      require_equal(require_throws<std::runtime_error>([&] { middle.wait(); }),
                    std::string("the user's"));
    });
  }
}

TEST_CASE("operations go on while the caller does something else", "[backend][engine][thread]") {
  run_threads(3, [](thread_communicator& comm) {
    std::vector<std::thread::id> threads;
    std::atomic<bool> over = false;
    request<void> pending(comm.driver(), comm.start({.operation = "noting"}, [&](auto context) {
      return noting_task(context, &threads, &over);
    }));
    // Neither a wait nor a question, which would make the progress themselves.
    require(comes_true(over), "no progress without the caller");
    pending.wait();
  });
}

TEST_CASE("a blocking operation with nothing before it never leaves the caller's thread",
          "[backend][engine][thread]") {
  run_threads(3, [](thread_communicator& comm) {
    auto copy = comm.duplicate();
    std::atomic<bool> held = false, let_go = false, in_vain = false;
    request<void> other(copy.driver(), copy.start({.operation = "holding"}, [&](auto context) {
      return holding_task(context, {std::this_thread::get_id()}, &held, &let_go, &in_vain);
    }));
    while (!held) std::this_thread::sleep_for(1ms);
    std::vector<std::thread::id> threads;
    std::atomic<bool> over = false;
    comm.run({.operation = "noting"},
             [&](auto context) { return noting_task(context, &threads, &over); });
    let_go = true;
    other.wait();
    require(!in_vain, "waited for the communication thread");
    require(threads == std::vector(5, std::this_thread::get_id()), "another thread took part");
  });
}

TEST_CASE("another thread may wait, or ask, while the caller goes on",
          "[backend][engine][thread]") {
  run_threads(3, [](thread_communicator& comm) {
    std::vector<std::vector<int>> values(40, std::vector<int>(600, 1));
    for (int round = 0; round < 5; ++round) {
      std::vector<request<void>> requests;
      for (auto& each : values) {
        each.assign(each.size(), 1);
        requests.push_back(allreduce_nonblocking(comm, each, each, reduce_op::sum));
      }
      std::jthread helper([&] {
        for (std::size_t i = 0; i < requests.size(); i += 2) requests[i].wait();
      });
      std::jthread watcher([&] {
        while (comm.statistics().operations < 0) {
        }
      });
      for (std::size_t i = 1; i < requests.size(); i += 2) {
        while (!requests[i].ready()) std::this_thread::yield();
        requests[i].wait();
      }
      std::vector<int> own(3, 1);
      allreduce(comm, own, own, reduce_op::sum);
      helper.join();
      for (const auto& each : values) require_equal(each.back(), 3);
    }
  });
}

TEST_CASE("threads may each use a communicator of their own over one engine",
          "[backend][engine][thread]") {
  run_threads(3, [](thread_communicator& comm) {
    auto copy = comm.duplicate();
    const auto use = [](thread_communicator& mine) {
      for (int i = 0; i < 300; ++i) {
        std::vector<int> x(static_cast<std::size_t>(1 + i % 7 * 100), mine.rank()), y = x;
        auto pending = allreduce_nonblocking(mine, x, x, reduce_op::sum);
        if (i % 2 == 0) allreduce(mine, y, y, reduce_op::max);
        pending.wait();
        require_equal(x[0], 3);
        if (i % 2 == 0) require_equal(y[0], 2);
      }
    };
    std::exception_ptr problem;
    {
      std::jthread other([&] {
        try {
          use(copy);
        } catch (...) {
          problem = std::current_exception();
        }
      });
      use(comm);
    }
    if (problem) std::rethrow_exception(problem);
  });
}

TEST_CASE("sends and receives may be listed in any order", "[backend][engine][thread]") {
  for (unsigned order = 0; order < 16; ++order)
    run_threads(4, [&](thread_communicator& comm) {
      std::vector<int> all(4, -1);
      const bool receives_first = (order >> static_cast<unsigned>(comm.rank()) & 1U) != 0;
      comm.run({.operation = "shuffle"}, [&](auto context) {
        return
            [](operation_context<thread_backend> ranks, bool first, std::vector<int>* out) -> task {
              const std::vector<int> own{ranks.rank()};
              auto exchange = ranks.exchange();
              for (const bool receives : {first, !first})
                for (int peer = 0; peer < ranks.size(); ++peer) {
                  if (peer == ranks.rank()) continue;
                  if (receives)
                    exchange.receive(as_mutable_buffer(*out).slice(peer, 1), peer);
                  else
                    exchange.send(as_buffer(own), peer);
                }
              auto transfer = std::move(exchange).submit();
              co_await transfer;
              (*out)[static_cast<std::size_t>(ranks.rank())] = ranks.rank();
            }(context, receives_first, &all);
      });
      require(all == std::vector<int>{0, 1, 2, 3});
    });
}

TEST_CASE("large messages in both directions do not wait for each other",
          "[backend][engine][thread]") {
  run_threads(2, [](thread_communicator& comm) {
    auto sent = swap_with(comm, 1 - comm.rank(), std::vector<int>(16'000'000, comm.rank()));
    auto again = swap_with(comm, 1 - comm.rank(), std::vector<int>(16, comm.rank() + 10));
    require_equal(again.wait().back(), 11 - comm.rank());
    require_equal(sent.wait().back(), 1 - comm.rank());
  });
}

TEST_CASE("without a communication thread every wait serves all communicators",
          "[backend][engine][thread]") {
  const auto failures = bluefog_test::run_wrapped(
      2, [](thread_backend inner) { return foreground_backend(std::move(inner)); },
      [](communicator<foreground_backend>& comm) {
        auto copy = comm.duplicate();
        std::vector<int> x(4000, 1), y(4000, 1);
        for (int i = 0; i < 50; ++i) {
          auto pending = allreduce_nonblocking(comm, x, x, reduce_op::max);
          if (comm.rank() == 0) {
            allreduce(copy, y, y, reduce_op::max);  // rank 1 gets here only after the other
            pending.wait();
          } else {
            pending.wait();
            allreduce(copy, y, y, reduce_op::max);
          }
        }
      },
      {.timeout = 20s});
  CHECK(bluefog_test::first_text(failures) == "");
}

TEST_CASE("where one thread alone is served another one's wait is refused and loses nothing",
          "[backend][engine][thread]") {
  const bluefog_test::log_capture log;
  std::latch refused(1);  // until then rank 1 keeps rank 0's request from ending
  const auto failures = bluefog_test::run_wrapped(
      2, [](thread_backend inner) { return foreground_backend(std::move(inner)); },
      [&](communicator<foreground_backend>& comm) {
        std::vector<int> x(4000, comm.rank()), y(4000, 1);
        if (comm.rank() == 1) refused.wait();
        std::optional pending = allreduce_nonblocking(comm, x, x, reduce_op::sum);
        if (comm.rank() == 0) {
          std::string text;
          std::thread([&] {
            static_cast<void>(pending->ready());
            try {
              pending->wait();
            } catch (const usage_error& problem) {
              text = problem.what();
            }
          }).join();
          refused.count_down();
          require_contains(text, "request::wait: the transport serves one thread only");
        }
        pending->wait();
        require_equal(x.back(), 1);

        const auto told = [&] { return !log.lines_with("waited for on a thread").empty(); };
        if (comm.rank() == 1) static_cast<void>(comes_true(told));
        pending.emplace(allreduce_nonblocking(comm, y, y, reduce_op::sum));
        std::atomic<bool> dropped = false;
        std::thread dropping([&] {
          pending.reset();  // waits, as every request does
          dropped = true;
        });
        if (comm.rank() == 0) static_cast<void>(comes_true(told));
        for (std::vector<int> all(1); all.front() == 0;) {  // what happens, happens in here
          all.front() = dropped ? 1 : 0;
          allreduce(comm, all, all, reduce_op::min);
        }
        dropping.join();
        require_equal(y.back(), 2);
      },
      {.timeout = 20s, .stall_warning = 50ms});
  CHECK(bluefog_test::first_text(failures) == "");
  const auto told = log.lines_with("waited for on a thread");
  REQUIRE(!told.empty());
  CHECK(told.front().find("stall: allreduce (operation 2) is waited for") == 0);
}

TEST_CASE("a time-out names all missing ranks, for every operation", "[backend][engine][thread]") {
  const bluefog_test::log_capture quiet;
  bluefog_test::meeting together(8);
  std::atomic<int> told = 0;
  run_threads(8,
              [&](thread_communicator& comm) {
                const bool absent = comm.rank() == 2 || comm.rank() == 5;
                if (!absent) {
                  std::vector<double> x(10), y(10);
                  const auto expect = [&](const std::string& text, std::string_view operation) {
                    require_contains(text, operation);
                    require_contains(text, "timed out");
                    require_contains(text, "not heard from ranks 2, 5");
                    ++told;
                  };
                  // All who are there wait at once: the second and later to give up are told by
                  // others.
                  try {
                    allreduce(comm, x, y);
                  } catch (const timeout_error& problem) {
                    expect(problem.what(), "allreduce (operation 1)");
                  } catch (const peer_error& problem) {
                    require_contains(problem.what(), "gave it up");
                  }
                }
                together.arrive_and_wait();
                // And everybody is in step again.
                std::vector<int> z(1, 1);
                if (absent) require_throws<error>([&] { allreduce(comm, z, z, reduce_op::sum); });
                together.arrive_and_wait();
                z[0] = 1;
                allreduce(comm, z, z, reduce_op::sum);
                require_equal(z[0], 8);
              },
              {.timeout = 1500ms, .stall_warning = 300ms});
  CHECK(told >= 1);
}

TEST_CASE("of a warning later than the time-out only the time-out is left",
          "[backend][engine][thread]") {
  const bluefog_test::log_capture log;
  bluefog_test::meeting end(3);
  std::atomic<int> told = 0;
  run_threads(3,
              [&](thread_communicator& comm) {
                std::vector<int> x(5, 1);
                std::string text;
                if (comm.rank() != 1) {
                  try {
                    allreduce(comm, x, x, reduce_op::sum);
                  } catch (const timeout_error& problem) {
                    text = problem.what();
                    ++told;
                  } catch (const peer_error&) {  // of the one that gave up first
                  }
                }
                end.arrive_and_wait();
                // The other one that waits has said so, though nothing was to be warned of.
                require(text.empty() || text.ends_with("not heard from rank 1"), text);
              },
              {.timeout = 500ms, .stall_warning = 60s});
  CHECK(told >= 1);
  CHECK(log.lines_with("stall").empty());
}

TEST_CASE("a rank that came after it was asked is not said to be missing",
          "[backend][engine][thread]") {
  const bluefog_test::log_capture quiet;
  bluefog_test::meeting end(3);
  run_threads(3,
              [&](thread_communicator& comm) {
                std::vector<int> x(5, 1), y(5, 1);
                if (comm.rank() != 1) {
                  // Rank 2 asks of both operations before rank 0 has begun them.
                  if (comm.rank() == 0) std::this_thread::sleep_for(1800ms);
                  auto first = allreduce_nonblocking(comm, x, x, reduce_op::sum);
                  auto second = allreduce_nonblocking(comm, y, y, reduce_op::sum);
                  require_throws<error>([&] { first.wait(); });
                  const auto text = require_throws<error>([&] { second.wait(); });
                  if (comm.rank() == 2) require(text.ends_with("; not heard from rank 1"), text);
                }
                end.arrive_and_wait();
              },
              {.timeout = 3s, .stall_warning = 60s});
}

// Rank 0 gives an operation up; both ranks make one of another communicator, which shares the
// engine. It begins there `early` after the first, or when that is over; rank 1 comes `late` after
// the time-out.
static void give_one_up(const communicator_options& limits,
                        std::optional<std::chrono::milliseconds> early,
                        std::chrono::milliseconds late) {
  bluefog_test::meeting timed_out(2);
  run_threads(
      2,
      [&](thread_communicator& comm) {
        auto other = comm.duplicate();
        std::vector<int> x(5, 1), y(5, 1);
        const auto begin = [&] { return allreduce_nonblocking(other, y, y, reduce_op::sum); };
        std::optional<request<void>> second;
        if (comm.rank() == 0) {
          auto given_up = allreduce_nonblocking(comm, x, x, reduce_op::sum);
          if (early) {
            std::this_thread::sleep_for(*early);
            second.emplace(begin());
          }
          require_throws<timeout_error>([&] { given_up.wait(); });
        }
        timed_out.arrive_and_wait();
        if (comm.rank() == 1) std::this_thread::sleep_for(late);
        if (!second) second.emplace(begin());
        second->wait();
      },
      limits);
}

TEST_CASE("what has timed out is not warned of later", "[backend][engine][thread]") {
  const bluefog_test::log_capture log;
  give_one_up({.timeout = 1s, .stall_warning = 1s}, std::nullopt, 100ms);
  CHECK(log.lines_with("stall").empty());
}

TEST_CASE("a stall that ends in a time-out is not said to be resolved",
          "[backend][engine][thread]") {
  const bluefog_test::log_capture log;
  give_one_up({.timeout = 4s, .stall_warning = 2s}, 3s, 0ms);
  CHECK(log.lines_with("stall on rank 0").size() == 1);
  CHECK(log.lines_with("resolved").empty());
}

TEST_CASE("operations queued behind one that times out do not wait for their own time",
          "[backend][engine][thread]") {
  const bluefog_test::log_capture quiet;
  bluefog_test::meeting end(2);
  run_threads(2,
              [&](thread_communicator& comm) {
                if (comm.rank() == 0) {
                  std::vector<std::vector<int>> values(10, std::vector<int>(10));
                  std::vector<request<void>> requests;
                  for (auto& each : values)  // check mode starts one after the other
                    requests.push_back(allreduce_nonblocking(comm, each, each, reduce_op::sum));
                  // Those behind the first may just have begun, or not: they end all the same.
                  for (auto& each : requests)
                    require_contains(require_throws<timeout_error>([&] { each.wait(); }),
                                     "timed out on rank 0");
                }
                end.arrive_and_wait();
              },
              {.check = true, .timeout = 1s, .stall_warning = 500ms});
}

TEST_CASE("a stall is told seldom, with who is missing, and told to be over",
          "[backend][engine][thread]") {
  for (const bool blocking : {true, false}) {
    const bluefog_test::log_capture log;
    run_threads(2,
                [&](thread_communicator& comm) {
                  std::vector<int> x(5, 1), y(5, 1);
                  if (comm.rank() == 1)
                    while (log.lines_with("stall on rank 0").size() < 2)
                      std::this_thread::sleep_for(1ms);
                  if (blocking) {
                    allreduce(comm, x, x, reduce_op::sum, {.name = "loss"});
                  } else {
                    auto first =
                        allreduce_nonblocking(comm, x, x, reduce_op::sum, {.name = "loss"});
                    auto second = allreduce_nonblocking(comm, y, y, reduce_op::sum);
                    first.wait();
                    second.wait();
                  }
                },
                {.timeout = 60s, .stall_warning = 40ms});
    const auto told = log.lines_with("stall");
    INFO(told.front());
    CHECK(told.front().find("stall on rank 0: allreduce \"loss\" (operation 1) has waited 0.") ==
          0);
    CHECK(told.front().find("for rank 1; not heard from rank 1") != std::string::npos);
    if (!blocking) CHECK(told[1].find("; 1 more operations wait") != std::string::npos);
    CHECK(told.back().find("stall resolved after 0.") == 0);
    CHECK(log.lines_with("resolved").size() == 1);
    CHECK(told.size() <= 4);  // two, perhaps a third while rank 1 wakes up, and the last
  }
}

TEST_CASE("a stall that ends in a failure is not called resolved", "[backend][engine][thread]") {
  for (const bool blocking : {true, false}) {
    const bluefog_test::log_capture log;
    bluefog_test::meeting end(2);
    run_threads(2,
                [&](thread_communicator& comm) {
                  std::vector<int> x(5, 1);
                  if (comm.rank() == 0) {
                    if (blocking)
                      require_throws<timeout_error>([&] { allreduce(comm, x, x, reduce_op::sum); });
                    else
                      require_throws<timeout_error>(
                          [&] { allreduce_nonblocking(comm, x, x, reduce_op::sum).wait(); });
                  }
                  end.arrive_and_wait();
                },
                {.timeout = 1s, .stall_warning = 300ms});
    CHECK_FALSE(log.lines_with("stall on rank 0").empty());
    CHECK(log.lines_with("resolved").empty());
  }
}

TEST_CASE("a communicator that an exception destroys gives its operations up",
          "[backend][engine][thread]") {
  const bluefog_test::log_capture quiet;
  std::string text;
  std::exception_ptr pending_failure;
  try {
    run_threads(2,
                [&](thread_communicator& comm) {
                  std::vector<int> x(5);
                  auto copy = std::make_unique<thread_communicator>(comm.duplicate());
                  if (comm.rank() == 1) throw std::runtime_error("boom");
                  auto pending = std::make_unique<request<void>>(
                      allreduce_nonblocking(*copy, x, x, reduce_op::sum));
                  try {
                    const auto dies = std::move(*copy);
                    throw std::logic_error("while it is outstanding");
                  } catch (const std::logic_error&) {
                  }
                  try {
                    pending->wait();
                  } catch (...) {
                    pending_failure = std::current_exception();
                  }
                },
                {.timeout = 20s});
  } catch (const std::exception& problem) {
    text = problem.what();
  }
  CHECK(text == "boom");
  CHECK_THROWS_AS(std::rethrow_exception(pending_failure), peer_error);
}

TEST_CASE("memory that the transport still has is kept until it lets go",
          "[backend][engine][thread]") {
  const bluefog_test::log_capture quiet;
  for (const bool blocking : {true, false}) {
    const auto last = std::make_shared<std::shared_ptr<stubborn_backend::transfer>>();
    const int before = counted_owner::living();
    auto in = std::make_shared<std::vector<int>>(1000, 1);
    auto out = std::make_shared<std::vector<int>>(1000, 2);
    const std::weak_ptr<std::vector<int>> watched = out;
    {
      communicator<stubborn_backend> comm(stubborn_backend(last),
                                          {.timeout = 30ms, .stall_warning = 10s});
      comm.transport().stuck = true;
      const auto make = [&](auto context) {
        return bluefog_test::swap_task(context, std::move(in), std::move(out), 1, counted_owner());
      };
      if (blocking) {
        CHECK_THROWS_AS(comm.run({.operation = "swap", .peer = 1}, make), timeout_error);
      } else {
        request<void> pending(comm.driver(), comm.start({.operation = "swap", .peer = 1}, make));
        CHECK_THROWS_AS(pending.wait(), timeout_error);
      }
      const auto stuck = *last;
      REQUIRE(stuck);
      CHECK(stuck->abandoned);
      CHECK(counted_owner::living() == before + 1);
      REQUIRE_FALSE(watched.expired());
      for (const auto& target : stuck->targets)  // the late message
        std::fill_n(target.data, target.bytes(), std::byte{7});
      stuck->over = true;
    }
    CHECK(counted_owner::living() == before);
    CHECK(watched.expired());
  }
}

TEST_CASE("nothing is left of many operations", "[backend][engine][thread]") {
  const int before = counted_owner::living();
  run_threads(2, [](thread_communicator& comm) {
    const int peer = 1 - comm.rank();
    std::vector<request<std::vector<int>>> window;
    for (int i = 0; i < many / 2; ++i) {
      window.push_back(swap_with(comm, peer, {comm.rank(), i}, counted_owner()));
      if (window.size() < 16) continue;
      for (int k = i - 15; auto& each : window) {
        if (k % 5 != 0) require(each.wait() == std::vector<int>{peer, k});
        ++k;  // every fifth is dropped unasked
      }
      window.clear();
    }
    std::vector<int> x(1);
    for (int i = 0; i < many / 2; ++i) {
      x[0] = comm.rank() + i;
      allreduce(comm, x, x, reduce_op::sum);
      require_equal(x[0], 1 + 2 * i);
    }
  });
  CHECK(counted_owner::living() == before);
}

RANKS_TEST("a rank that takes no part is noticed by those that wait for it, who may give up",
           "[backend][withdrawal]") {
  if (comm.size() == 1 || !letter_backend<typename Comm::backend_type>) return;
  for (int round = 0; round < 3; ++round) {
    auto group = comm.duplicate();
    if (comm.rank() == round % comm.size()) {
      group.withdraw();
    } else {
      const auto all = std::make_shared<std::vector<double>>(static_cast<std::size_t>(comm.size()));
      const auto started = group.start({.operation = "gathering"}, [&](auto context) {
        return gather_equal(context, std::vector<double>{1.0}, all);
      });
      group.driver()->wait(*started, [&] { return group.lacks_rank(); });
      group.give_up();
      require(started->over(), "given up, and not over");
      // By this rank, or by another one that this one has heard of.
      require_throws<error>([&] { started->rethrow(); });
    }
    std::vector<int> sum{comm.rank()};
    allreduce(comm, sum, sum, reduce_op::sum);  // the others' messages are not disturbed
    require_equal(sum.front(), sum_of_ranks(comm.size()));
    group.listen();
    require(comm.rank() == round % comm.size() || group.will_lack_rank(), "not noticed");
  }
}
