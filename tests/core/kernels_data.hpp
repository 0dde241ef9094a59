// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/half.hpp>
#include <bluefog/core/kernels/element.hpp>
#include <bluefog/core/kernels/instruction_set.hpp>

/// Arrays for the tests of the kernels.
namespace bluefog_test {

/// Lengths around those of vectors and tiles.
inline const std::vector<std::int64_t> lengths = {0, 1, 7, 8, 9, 31, 1000, 4099};

/// The instruction sets that this machine has.
inline std::vector<bluefog::kernel::detail::instruction_set> instruction_sets() {
  using enum bluefog::kernel::detail::instruction_set;
  if (bluefog::kernel::detail::fastest_instruction_set() == portable) return {portable};
  return {portable, avx2};
}

/// \return `value` as a `T`; the one place where tests make halves.
template <class T>
T to_element(double value) {
  if constexpr (sizeof(T) == 2 && !std::integral<T>)
    return T(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

/// Elements at an odd address.
template <bluefog::element T>
class unaligned_array {
 public:
  explicit unaligned_array(std::int64_t count)
      : count_(count), bytes_(static_cast<std::size_t>(count) * sizeof(T) + 1) {}

  [[nodiscard]] std::int64_t size() const { return count_; }
  [[nodiscard]] std::byte* data() { return bytes_.data() + 1; }
  [[nodiscard]] const std::byte* data() const { return bytes_.data() + 1; }
  [[nodiscard]] bluefog::mutable_buffer buffer() {
    return {data(), count_, bluefog::dtype_of<T>::value};
  }
  [[nodiscard]] bluefog::const_buffer buffer() const {
    return {data(), count_, bluefog::dtype_of<T>::value};
  }

  void set(std::int64_t index, T value) {
    std::memcpy(data() + index * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
  }
  [[nodiscard]] T get(std::int64_t index) const {
    T value;
    std::memcpy(&value, data() + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    return value;
  }
  /// \return an element as a number, exactly unless it is a large integer.
  [[nodiscard]] double number(std::int64_t index) const {
    if constexpr (sizeof(T) == 2 && !std::integral<T>)
      return static_cast<double>(static_cast<float>(get(index)));
    else
      return static_cast<double>(get(index));
  }

  /// Bit for bit, so that equal includes what is not a number.
  friend bool operator==(const unaligned_array& a, const unaligned_array& b) {
    return a.count_ == b.count_ &&
           std::equal(a.bytes_.begin() + 1, a.bytes_.end(), b.bytes_.begin() + 1);
  }

 private:
  std::int64_t count_;
  std::vector<std::byte> bytes_;
};

/// \return elements drawn by `draw(random)`, a double.
template <bluefog::element T, class Draw>
unaligned_array<T> filled(std::int64_t count, std::mt19937_64& random, Draw draw) {
  unaligned_array<T> values(count);
  for (std::int64_t i = 0; i < count; ++i) values.set(i, to_element<T>(draw(random)));
  return values;
}

/// \return elements whose sums and small multiples are exact in every floating type: integers from
/// -7 to 7; for unsigned types and bool, their magnitudes or whether they are not 0.
template <bluefog::element T>
unaligned_array<T> small_integers(std::int64_t count, std::mt19937_64& random) {
  std::uniform_int_distribution<int> draw(std::is_same_v<T, std::uint8_t> ? 0 : -7, 7);
  return filled<T>(count, random, [&](std::mt19937_64& bits) { return draw(bits); });
}

/// \return elements of normal distribution.
template <bluefog::element T>
unaligned_array<T> normal(std::int64_t count, std::mt19937_64& random) {
  std::normal_distribution<double> draw;
  return filled<T>(count, random, [&](std::mt19937_64& bits) { return draw(bits); });
}

/// \return elements of random bits: for floating types, of every magnitude, infinities and NaNs.
template <bluefog::element T>
unaligned_array<T> random_bits(std::int64_t count, std::mt19937_64& random) {
  unaligned_array<T> values(count);
  const auto bytes = values.buffer().bytes();
  for (std::size_t k = 0; k < bytes; ++k)
    values.data()[k] = static_cast<std::byte>(random() % (std::is_same_v<T, bool> ? 2 : 256));
  return values;
}

}  // namespace bluefog_test
