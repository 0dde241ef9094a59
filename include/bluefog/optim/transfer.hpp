// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <memory>
#include <utility>

#include <bluefog/backend/engine.hpp>
#include <bluefog/backend/job.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/core/unwinding.hpp>

namespace bluefog::optim::detail {

/// An operation that an optimizer has started. Its memory belongs to the operation itself.
///
/// Destroying an unfinished one waits for it; while an exception unwinds the stack it is left to
/// the communicator instead, since the other ranks may never come to their part of it.
class transfer {
 public:
  transfer(std::shared_ptr<engine> driver, std::shared_ptr<job> started) noexcept
      : engine_(std::move(driver)), job_(std::move(started)) {}
  transfer(transfer&&) noexcept = default;
  transfer(const transfer&) = delete;
  transfer& operator=(transfer&&) = delete;
  transfer& operator=(const transfer&) = delete;
  ~transfer() {
    if (job_ && !unwinding_.now()) engine_->wait(*job_);
  }

  /// Blocks until the operation is over, or `in_vain()` says that it need not be waited for.
  /// \return whether it is over.
  template <std::predicate InVain>
  [[nodiscard]] bool over_unless(InVain in_vain) const {
    return !job_ || engine_->wait(*job_, in_vain);
  }
  /// Blocks until the operation is over; once. \throws what it failed with.
  void wait() { bluefog::detail::finish(*engine_, job_); }

 private:
  std::shared_ptr<engine> engine_;
  std::shared_ptr<job> job_;
  bluefog::detail::unwinding unwinding_;
};

}  // namespace bluefog::optim::detail
