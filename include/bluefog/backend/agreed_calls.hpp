// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace bluefog {

/// What check mode has found equal on all ranks last; empty, and without memory, elsewhere.
///
/// The same on every rank, for operations of all ranks are compared one after the other.
class agreed_calls {
 public:
  void add(std::string_view call) {
    constexpr std::size_t most = 4;
    if (calls_.size() == most) calls_.erase(calls_.begin());
    calls_.emplace_back(call);
  }

  /// \return e.g. "; before it: barrier, allreduce float32 [10] sum", the latest at the end.
  [[nodiscard]] std::string text() const {
    std::string all;
    for (const auto& each : calls_) all.append(all.empty() ? "; before it: " : ", ").append(each);
    return all;
  }

 private:
  std::vector<std::string> calls_;
};

}  // namespace bluefog
