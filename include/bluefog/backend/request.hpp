// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <exception>
#include <memory>
#include <type_traits>
#include <utility>

#include <bluefog/backend/engine.hpp>
#include <bluefog/backend/job.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/logger.hpp>

namespace bluefog {

namespace detail {

/// Waits for an operation and lets it go. \throws what it failed with.
inline void finish(engine& driver, std::shared_ptr<job>& started) {
  driver.wait(*started);
  const auto over = std::exchange(started, nullptr);
  over->release_name();
  over->rethrow();
}

}  // namespace detail

/// The part of a request that does not depend on its value.
class request_base {
 public:
  request_base(request_base&&) noexcept = default;
  request_base& operator=(request_base&&) = delete;  // would forget an operation in progress
  request_base(const request_base&) = delete;
  request_base& operator=(const request_base&) = delete;

  /// \return whether `wait` would return at once. Makes progress; never blocks.
  /// \throws usage_error after `wait`, or if the request was moved from.
  [[nodiscard]] bool ready() {
    expects(job_ != nullptr, "request::ready: the request is empty: waited for or moved from");
    return engine_->ready(*job_);
  }

 protected:
  request_base(std::shared_ptr<engine> driver, std::shared_ptr<job> started) noexcept
      : engine_(std::move(driver)), job_(std::move(started)) {}

  ~request_base() { close(); }

  // Waits for an operation that nobody has waited for.
  void close() noexcept {
    if (!job_) return;
    try {
      detail::finish(*engine_, job_);
    } catch (const std::exception& problem) {
      logger::write(log_level::warning,
                    concat("a request that nobody waited for failed: ", problem.what()));
    } catch (...) {
      logger::write(log_level::warning, "a request that nobody waited for failed");
    }
  }

  void finish() {
    expects(job_ != nullptr, "request::wait: the request is empty: waited for or moved from");
    expects(engine_->drives() || engine_->ready(*job_),
            "request::wait: the transport serves one thread only; wait on the thread that made the "
            "communicator");
    detail::finish(*engine_, job_);
  }

 private:
  std::shared_ptr<engine> engine_;
  std::shared_ptr<job> job_;
};

/// A value that arrives when an operation completes.
///
/// Move-only; any thread may wait, one at a time. Destroying an unfinished request waits for it: a
/// forgotten request becomes a visible wait, never a write to freed memory. With `Value` = void the
/// operation writes to memory of the caller, which must outlive it.
template <class Value>
  requires std::movable<Value> || std::is_void_v<Value>
class request : public request_base {
 public:
  request(std::shared_ptr<engine> driver, std::shared_ptr<job> started, Value value)
      : request(std::move(driver), std::move(started), std::make_shared<Value>(std::move(value))) {}
  /// A value that the operation itself makes, in the place that it shares with the request.
  request(std::shared_ptr<engine> driver, std::shared_ptr<job> started,
          std::shared_ptr<Value> arriving) noexcept
      : request_base(std::move(driver), std::move(started)), value_(std::move(arriving)) {}
  request(request&&) noexcept = default;
  request& operator=(request&&) = delete;
  request(const request&) = delete;
  request& operator=(const request&) = delete;
  ~request() { this->close(); }  // before the value goes, which the operation may still write

  /// Blocks until the operation completes, then hands the value over; once.
  /// \throws transport_error, timeout_error, mismatch_error or peer_error if the operation failed;
  ///         usage_error on a second call.
  Value wait() {
    finish();
    return std::move(*value_);
  }

 private:
  std::shared_ptr<Value> value_;
};

template <>
class request<void> : public request_base {
 public:
  request(std::shared_ptr<engine> driver, std::shared_ptr<job> started) noexcept
      : request_base(std::move(driver), std::move(started)) {}

  /// Blocks until the operation completes; once. Throws as `request<Value>::wait`.
  void wait() { finish(); }
};

}  // namespace bluefog
