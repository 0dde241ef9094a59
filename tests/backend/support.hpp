// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <bluefog/backend.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/thread.hpp>

#include "support/ranks.hpp"

namespace bluefog_test {

/// Collects what the log says while it lives.
class log_capture {
 public:
  log_capture()
      : before_(bluefog::logger::sink([this](bluefog::log_level, std::string_view line) {
          const std::scoped_lock lock(mutex_);
          lines_.emplace_back(line);
        })) {}
  log_capture(const log_capture&) = delete;
  log_capture& operator=(const log_capture&) = delete;
  ~log_capture() { bluefog::logger::sink(std::move(before_)); }

  [[nodiscard]] std::vector<std::string> lines_with(std::string_view part) const {
    const std::scoped_lock lock(mutex_);
    std::vector<std::string> found;
    std::ranges::copy_if(lines_, std::back_inserter(found), [&](const std::string& line) {
      return line.find(part) != std::string::npos;
    });
    return found;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
  bluefog::logger::sink_type before_;
};

/// Counts its living copies.
class counted_owner {
 public:
  counted_owner() { ++living(); }
  counted_owner(const counted_owner&) { ++living(); }
  counted_owner(counted_owner&&) noexcept { ++living(); }
  counted_owner& operator=(const counted_owner&) = default;
  counted_owner& operator=(counted_owner&&) noexcept = default;
  ~counted_owner() { --living(); }

  [[nodiscard]] static std::atomic<int>& living() {
    static std::atomic<int> count = 0;
    return count;
  }
};

/// Where the ranks of a test wait for each other. One that ended early is an error, not a hang.
class meeting {
 public:
  explicit meeting(int size) : size_(size) {}

  void arrive_and_wait() {
    std::unique_lock lock(mutex_);
    const int before = rounds_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++rounds_;
      all_here_.notify_all();
    } else if (!all_here_.wait_for(lock, std::chrono::seconds(60),
                                   [&] { return rounds_ != before; })) {
      throw std::runtime_error("a rank did not come");
    }
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  int arrived_ = 0;
  int rounds_ = 0;
};

/// Runs `body(communicator<Backend>&)` on thread ranks over `wrap(thread_backend)`, and `leave()`
/// on each at its end. \return what each rank threw, null where nothing.
template <class Wrap, class Body>
std::vector<std::exception_ptr> run_wrapped(
    int size, const Wrap& wrap, const Body& body, const bluefog::communicator_options& options = {},
    const std::function<void()>& leave = [] {}) {
  using backend = decltype(wrap(bluefog::thread_backend()));
  const auto group = std::make_shared<bluefog::threads::fabric>(size);
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> ranks;
    std::barrier<> started(size);  // a slow machine may take longer than a test's time-out
    for (int rank = 0; rank < size; ++rank)
      ranks.emplace_back([&, rank] {
        started.arrive_and_wait();
        try {
          bluefog::communicator<backend> comm(wrap(bluefog::thread_backend(group, rank)), options);
          body(comm);
        } catch (...) {
          failures[static_cast<std::size_t>(rank)] = std::current_exception();
        }
        group->leave(rank);
        leave();
      });
    for (auto& rank : ranks) rank.join();
  }
  return failures;
}

/// \return the first text of `failures`, empty if there is none.
[[nodiscard]] inline std::string first_text(const std::vector<std::exception_ptr>& failures) {
  for (const auto& failure : failures) try {
      if (failure) std::rethrow_exception(failure);
    } catch (const std::exception& problem) {
      return problem.what();
    }
  return {};
}

/// \return whether it holds within ten seconds; neither waits for a request nor asks one.
[[nodiscard]] bool comes_true(const std::predicate auto& holds) {
  const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!holds() && std::chrono::steady_clock::now() < latest)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return holds();
}
[[nodiscard]] inline bool comes_true(const std::atomic<bool>& flag) {
  return comes_true([&] { return flag.load(); });
}

/// Exchanges `count` values with everybody in each of several steps, and notes which thread takes
/// each step, and the end.
template <bluefog::backend Backend>
bluefog::task noting_task(bluefog::operation_context<Backend> context,
                          std::vector<std::thread::id>* threads, std::atomic<bool>* over,
                          std::size_t count = 1) {
  const auto all = std::make_shared<std::vector<int>>();
  for (int step = 0; step < 4; ++step) {
    threads->push_back(std::this_thread::get_id());
    auto gathering = bluefog::gather_equal(context, std::vector<int>(count, step), all);
    co_await std::move(gathering);
  }
  threads->push_back(std::this_thread::get_id());
  *over = true;
}

/// Sends `*in` to `peer` and receives `*out` from it; keeps both, and `owner`, alive.
template <bluefog::backend Backend, class Owner>
bluefog::task swap_task(bluefog::operation_context<Backend> context,
                        std::shared_ptr<std::vector<int>> in, std::shared_ptr<std::vector<int>> out,
                        int peer, [[maybe_unused]] Owner owner) {
  auto exchange = context.exchange();
  exchange.send(bluefog::as_buffer(*in), peer);
  exchange.receive(bluefog::as_mutable_buffer(*out), peer);
  auto transfer = std::move(exchange).submit();
  co_await transfer;
}

/// Starts an operation of this rank and `peer`: each gets the other's values.
template <bluefog::backend Backend, class Owner = std::nullptr_t>
bluefog::request<std::vector<int>> swap_with(bluefog::communicator<Backend>& comm, int peer,
                                             std::vector<int> values, Owner owner = {}) {
  auto in = std::make_shared<std::vector<int>>(std::move(values));
  auto out = std::make_shared<std::vector<int>>(in->size());
  auto started = comm.start({.operation = "swap", .peer = peer}, [&](auto context) {
    return swap_task(context, in, out, peer, std::move(owner));
  });
  return {comm.driver(), std::move(started), std::move(out)};
}

}  // namespace bluefog_test
