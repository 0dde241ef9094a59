// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>

namespace bluefog::detail {

/// Lets a destructor know whether an exception has come since: a member of what may be destroyed
/// while it unwinds the stack. Asked on the thread that made it.
class unwinding {
 public:
  [[nodiscard]] bool now() const noexcept { return std::uncaught_exceptions() > before_; }

 private:
  int before_ = std::uncaught_exceptions();
};

}  // namespace bluefog::detail
