// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <bluefog/communicator.hpp>
#include <bluefog/core/dtype.hpp>

#include "support/ranks.hpp"

namespace bluefog_test {

/// An array of any element type in one piece of memory; std::vector<bool> is none.
template <bluefog::element T>
class values {
 public:
  using value_type = T;

  values() = default;
  /// \param make  gives element i.
  template <class Make>
  values(std::size_t count, Make make) : data_(std::make_unique<T[]>(count)), count_(count) {
    for (std::size_t i = 0; i < count; ++i) data_[i] = static_cast<T>(make(i));
  }
  explicit values(std::size_t count) : data_(std::make_unique<T[]>(count)), count_(count) {}

  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] T* data() { return data_.get(); }
  [[nodiscard]] const T* data() const { return data_.get(); }
  [[nodiscard]] T* begin() { return data(); }
  [[nodiscard]] T* end() { return data() + count_; }
  [[nodiscard]] const T* begin() const { return data(); }
  [[nodiscard]] const T* end() const { return data() + count_; }
  [[nodiscard]] T& operator[](std::size_t i) { return data_[i]; }
  [[nodiscard]] const T& operator[](std::size_t i) const { return data_[i]; }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t count_ = 0;
};

/// \return a number as something that prints and compares.
template <bluefog::element T>
[[nodiscard]] double number(T value) {
  if constexpr (sizeof(T) == 2 && !std::is_integral_v<T>)
    return static_cast<double>(static_cast<float>(value));
  else
    return static_cast<double>(value);
}

/// \return a small whole number that tells ranks and places apart; a valid value of every dtype.
[[nodiscard]] inline int sample(int rank, std::size_t place) {
  return 1 + (rank * 5 + static_cast<int>(place % 1009) * 3) % 7;
}

#ifdef BLUEFOG_TEST_SANITIZED  // twenty times slower
inline constexpr std::array<std::size_t, 5> sizes{0, 1, 7, 500, 20011};
#else
inline constexpr std::array<std::size_t, 5> sizes{0, 1, 7, 5000, 100003};
#endif

inline constexpr std::array dtypes{bluefog::dtype::boolean, bluefog::dtype::uint8,
                                   bluefog::dtype::int8,    bluefog::dtype::int16,
                                   bluefog::dtype::int32,   bluefog::dtype::int64,
                                   bluefog::dtype::float16, bluefog::dtype::bfloat16,
                                   bluefog::dtype::float32, bluefog::dtype::float64};

/// \return what `act` adds to the statistics of `comm`.
template <class Comm, std::invocable Act>
[[nodiscard]] bluefog::statistics traffic_of(Comm& comm, Act act) {
  const auto before = comm.statistics();
  act();
  const auto after = comm.statistics();
  return {after.bytes_sent - before.bytes_sent, after.messages_sent - before.messages_sent,
          after.operations - before.operations, after.control_bytes - before.control_bytes,
          after.control_messages - before.control_messages};
}

}  // namespace bluefog_test
