// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <coroutine>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>

namespace bluefog {

namespace detail {

/// Whether operations issued later on the same communicator may start before this one is over.
///
/// They may, by default, once this one has started. An algorithm that issues native collectives
/// after its first wait has to `co_await order::hold` first and `co_await order::release` after the
/// last of them, or ranks would issue them in different orders.
enum class order : std::uint8_t { hold, release };

/// Awaited in a task, a variable of this kind keeps its owner until the outermost task is over. An
/// inner task's own frame goes when that one ends, and on a device with memory that messages, and
/// computations, which have been launched still work with.
struct lasting {
  std::shared_ptr<const void> owner;
};

}  // namespace detail

/// A reference to any pending operation. Borrows it.
class pending_reference {
 public:
  template <pending_operation Operation>
  [[nodiscard]] static pending_reference to(Operation& operation) noexcept {
    pending_reference result;
    result.operation_ = &operation;
    result.ready_ = [](void* it) { return static_cast<Operation*>(it)->ready(); };
    result.abandon_ = [](void* it) noexcept { static_cast<Operation*>(it)->abandon(); };
    result.waiting_for_ = [](const void* it) {
      return static_cast<const Operation*>(it)->waiting_for();
    };
    if constexpr (requires { operation.failure(); })
      result.failure_ = [](const void* it) noexcept {
        return std::exception_ptr(static_cast<const Operation*>(it)->failure());
      };
    if constexpr (requires { operation.cause(); })
      result.cause_ = [](const void* it) noexcept {
        return std::exception_ptr(static_cast<const Operation*>(it)->cause());
      };
    return result;
  }

  [[nodiscard]] explicit operator bool() const noexcept { return operation_ != nullptr; }
  [[nodiscard]] bool ready() const { return ready_(operation_); }
  void abandon() const noexcept { abandon_(operation_); }
  [[nodiscard]] std::vector<int> waiting_for() const { return waiting_for_(operation_); }
  [[nodiscard]] std::exception_ptr failure() const noexcept {
    return failure_ != nullptr ? failure_(operation_) : nullptr;
  }
  [[nodiscard]] std::exception_ptr cause() const noexcept {
    return cause_ != nullptr ? cause_(operation_) : nullptr;
  }

 private:
  void* operation_ = nullptr;
  bool (*ready_)(void*) = nullptr;
  void (*abandon_)(void*) noexcept = nullptr;
  std::vector<int> (*waiting_for_)(const void*) = nullptr;
  std::exception_ptr (*failure_)(const void*) noexcept = nullptr;
  std::exception_ptr (*cause_)(const void*) noexcept = nullptr;
};

/// The algorithm of one operation: a coroutine that suspends at each native operation it awaits.
///
/// Whoever drives it calls `advance()` until that returns true; nothing ever blocks. The frame owns
/// the temporary memory and keeps the caller's tensors alive, so it may only be destroyed when
/// `settled()`. Starts lazily. A moved-from task is over.
///
/// A coroutine awaits each native operation before it submits the next: at most one is in flight,
/// so that an exception never leaves another one writing into the frame. What is sent and received
/// at the same time belongs into one exchange.
///
///     task swap(context, buffers...) {
///       auto exchange = context.exchange();
///       exchange.send(in, peer);
///       exchange.receive(out, peer);
///       auto transfer = std::move(exchange).submit();
///       co_await transfer;
///     }
class task {
 public:
  class promise_type;
  using handle_type = std::coroutine_handle<promise_type>;

  task() noexcept = default;
  task(task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  task& operator=(task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  task(const task&) = delete;
  task& operator=(const task&) = delete;
  ~task() {
    if (handle_) handle_.destroy();
  }

  /// Makes progress without blocking. \return whether the task is over.
  bool advance();
  /// \return why the task failed, null if it did not; asked once it is over.
  [[nodiscard]] std::exception_ptr failure() const noexcept;
  /// \return whether the order of native collectives forbids to start later operations.
  [[nodiscard]] bool holds_order() const noexcept;
  /// \return the ranks whose part is missing, where the transport knows.
  [[nodiscard]] std::vector<int> waiting_for() const;
  /// \return why what the task awaits has failed, where the transport has not let go of it; null
  ///         otherwise. Then the task has to be given up.
  [[nodiscard]] std::exception_ptr stuck() const noexcept;
  /// \return why what the task awaits will fail once the transport has let go of all of it; null if
  ///         that is not known.
  [[nodiscard]] std::exception_ptr cause() const noexcept;
  /// Gives the task up: it will never advance again, and asks the transport to let go.
  void abandon() noexcept;
  /// \return whether an abandoned task may be destroyed. Makes progress.
  [[nodiscard]] bool settled() noexcept;

 private:
  explicit task(handle_type handle) noexcept : handle_(handle) {}

  handle_type handle_;
};

/// What a task's coroutine and its driver share. Only the outermost task's promise is consulted;
/// tasks that are awaited inside another one point to it.
class task::promise_type {
 public:
  [[nodiscard]] task get_return_object() { return task(handle_type::from_promise(*this)); }
  [[nodiscard]] static std::suspend_always initial_suspend() noexcept { return {}; }
  [[nodiscard]] static auto final_suspend() noexcept {
    struct to_awaiting_task {
      static bool await_ready() noexcept { return false; }
      static std::coroutine_handle<> await_suspend(handle_type ended) noexcept {
        const auto awaiting = ended.promise().awaiting_;
        return awaiting ? awaiting : std::noop_coroutine();
      }
      static void await_resume() noexcept {}
    };
    return to_awaiting_task{};
  }
  void return_void() noexcept {}
  void unhandled_exception() noexcept { failure_ = std::current_exception(); }

  template <pending_operation Operation>
  [[nodiscard]] auto await_transform(Operation& operation) noexcept {
    struct completion {
      promise_type& outermost;
      Operation& awaited;
      bool await_ready() { return awaited.ready(); }
      void await_suspend(handle_type self) noexcept {
        outermost.pending_ = pending_reference::to(awaited);
        outermost.resume_ = self;
      }
      void await_resume() {
        if (outermost.problem_) std::rethrow_exception(std::exchange(outermost.problem_, {}));
      }
    };
    return completion{*outermost_, operation};
  }

  [[nodiscard]] auto await_transform(task&& inner) noexcept {
    struct inner_completion {
      promise_type& outermost;
      task inner;
      static bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(handle_type self) noexcept {
        inner.handle_.promise().outermost_ = &outermost;
        inner.handle_.promise().awaiting_ = self;
        return inner.handle_;
      }
      void await_resume() const {
        if (auto failure = inner.failure()) std::rethrow_exception(failure);
      }
    };
    return inner_completion{*outermost_, std::move(inner)};
  }

  [[nodiscard]] std::suspend_never await_transform(const detail::lasting& memory) {
    outermost_->kept_.push_back(memory.owner);
    return {};
  }

  [[nodiscard]] std::suspend_never await_transform(detail::order change) noexcept {
    outermost_->holds_ += change == detail::order::hold ? 1 : -1;
    return {};
  }

 private:
  friend class task;

  promise_type* outermost_ = this;
  std::coroutine_handle<> awaiting_;  // inner tasks: who goes on when this one ends
  std::exception_ptr failure_;

  // Of the outermost task:
  std::coroutine_handle<> resume_ = handle_type::from_promise(*this);
  pending_reference pending_;
  std::exception_ptr problem_;  // thrown by `pending_`, to be rethrown inside the coroutine
  int holds_ = 0;
  std::vector<std::shared_ptr<const void>> kept_;
};

inline bool task::advance() {
  if (!handle_ || handle_.done()) return true;
  auto& promise = handle_.promise();
  if (promise.pending_) {
    try {
      if (!promise.pending_.ready()) return false;
    } catch (...) {
      promise.problem_ = std::current_exception();
    }
    promise.pending_ = {};
  }
  promise.resume_.resume();
  return handle_.done();
}

inline std::exception_ptr task::failure() const noexcept {
  return handle_ ? handle_.promise().failure_ : nullptr;
}

inline bool task::holds_order() const noexcept {
  return handle_ && !handle_.done() && handle_.promise().holds_ > 0;
}

inline std::vector<int> task::waiting_for() const {
  return handle_ && handle_.promise().pending_ ? handle_.promise().pending_.waiting_for()
                                               : std::vector<int>{};
}

inline std::exception_ptr task::stuck() const noexcept {
  return handle_ && handle_.promise().pending_ ? handle_.promise().pending_.failure() : nullptr;
}

inline std::exception_ptr task::cause() const noexcept {
  return handle_ && handle_.promise().pending_ ? handle_.promise().pending_.cause() : nullptr;
}

inline void task::abandon() noexcept {
  if (handle_ && handle_.promise().pending_) handle_.promise().pending_.abandon();
}

inline bool task::settled() noexcept {
  if (!handle_ || !handle_.promise().pending_) return true;
  try {
    return handle_.promise().pending_.ready();
  } catch (...) {  // failed, so nothing touches the buffers any more
    return true;
  }
}

}  // namespace bluefog
