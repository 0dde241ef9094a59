// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <bluefog/backend/label.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/dtype.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog::detail {

/// What one rank contributes to a concatenation: `rows` rows of the dimensions `trailing` each.
struct gather_shape {
  static constexpr std::int64_t any = -1;

  std::int64_t rows = 0;
  std::vector<std::int64_t> trailing = {};
  std::int64_t room = any;  ///< how many rows the caller has room for

  /// A flat array.
  [[nodiscard]] static gather_shape flat(const_buffer in, std::int64_t room = any) {
    return {.rows = in.count, .room = room};
  }
  [[nodiscard]] std::int64_t row_elements() const {
    return std::reduce(trailing.begin(), trailing.end(), std::int64_t{1}, std::multiplies<>());
  }
};

/// A `gather_shape` as it travels.
struct gather_header {
  static constexpr std::size_t most_dimensions = 8;  // what is beyond is hashed into the last

  std::int64_t rows = 0;
  std::int64_t room = gather_shape::any;
  std::int64_t length = 0;
  std::int64_t type = 0;
  std::int64_t dimensions = 0;
  std::array<std::int64_t, most_dimensions> trailing{};

  gather_header() = default;
  gather_header(const gather_shape& shape, dtype element_type)
      : rows(shape.rows),
        room(shape.room),
        length(shape.rows * shape.row_elements() *
               static_cast<std::int64_t>(size_of(element_type))),
        type(static_cast<std::int64_t>(element_type)),
        dimensions(static_cast<std::int64_t>(shape.trailing.size())) {
    for (std::size_t i = 0; i < shape.trailing.size(); ++i) {
      auto& slot = trailing[std::min(i, most_dimensions - 1)];
      const auto hashed = static_cast<std::uint64_t>(slot) * 1000003;
      slot = static_cast<std::int64_t>((i < most_dimensions ? 0 : hashed) +
                                       static_cast<std::uint64_t>(shape.trailing[i]));
    }
  }

  /// \return the length of what follows, in bytes.
  [[nodiscard]] std::size_t bytes() const noexcept { return static_cast<std::size_t>(length); }

  /// \return whether rows of both can lie in one array.
  [[nodiscard]] bool fits(const gather_header& other) const {
    return type == other.type && dimensions == other.dimensions && trailing == other.trailing;
  }

  /// \return e.g. "float32 [5, 4, 3]".
  [[nodiscard]] std::string text() const {
    std::string result = concat(static_cast<dtype>(type), " [", rows);
    const auto all = static_cast<std::size_t>(dimensions);
    const auto shown = all <= most_dimensions ? all : most_dimensions - 1;
    for (std::size_t i = 0; i < shown; ++i) result += concat(", ", trailing[i]);
    return result + (all > shown ? ", ...]" : "]");
  }
};

/// \return the rows of each contribution.
[[nodiscard]] inline std::vector<std::int64_t> rows_of(std::span<const gather_header> headers) {
  std::vector<std::int64_t> rows;
  for (const gather_header& each : headers) rows.push_back(each.rows);
  return rows;
}

/// \return what is wrong with concatenating `headers`, which come from `ranks`; empty if nothing.
[[nodiscard]] inline std::string gather_problem(const gather_header& own, int rank,
                                                std::span<const gather_header> headers,
                                                std::span<const int> ranks) {
  for (std::size_t i = 0; i < headers.size(); ++i)
    if (!headers[i].fits(own))
      return concat("rank ", ranks[i], " gives ", headers[i].text(), ", rank ", rank, " ",
                    own.text(), "; only the first dimension may differ");
  const auto rows = rows_of(headers);
  const auto total = std::reduce(rows.begin(), rows.end(), std::int64_t{0});
  if (own.room == gather_shape::any || own.room == total) return {};
  return concat("rank ", rank, " has room for ", own.room, " elements, ", ranks_text(ranks),
                ranks.size() == 1 ? " gives " : " give ", total);
}

}  // namespace bluefog::detail
