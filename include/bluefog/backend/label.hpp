// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include <bluefog/backend/message.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

/// What messages call an operation.
struct operation_label {
  std::string_view operation;  ///< the public function; static storage
  std::string name;            ///< the user's name for this call, may be empty
  message_tag tag;
};

/// \return e.g. `allreduce "loss" (operation 7)`.
[[nodiscard]] inline std::string to_string(const operation_label& label) {
  std::string text(label.operation);
  if (!label.name.empty()) text += " \"" + label.name + "\"";
  return text + concat(label.tag.kind == channel::pair ? " (pair operation " : " (operation ",
                       label.tag.number, ")");
}

namespace detail {

/// \return e.g. "60 s", "0.25 s": to hundredths, as people read it.
[[nodiscard]] inline std::string seconds_text(std::chrono::nanoseconds time) {
  const double seconds = std::chrono::duration<double>(time).count();
  return concat(std::round(100 * seconds) / 100, " s");
}

/// \return e.g. "rank 3" or "ranks 0, 2, 5".
[[nodiscard]] inline std::string ranks_text(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

}  // namespace detail

}  // namespace bluefog
