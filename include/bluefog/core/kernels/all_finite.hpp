// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels/avx2.hpp>
#include <bluefog/core/kernels/instruction_set.hpp>

namespace bluefog::kernel {
namespace detail {

/// Looks at elements as words: exactly the infinite and the not-a-number ones have all bits of
/// `exponent` set. The words are those of elements [first, count).
template <std::unsigned_integral Word>
[[nodiscard]] bool all_finite_each(const std::byte* data, std::int64_t first, std::int64_t count,
                                   Word exponent) {
  for (std::int64_t i = first; i < count; ++i) {
    Word word;
    std::memcpy(&word, data + i * static_cast<std::int64_t>(sizeof(Word)), sizeof(Word));
    if ((word & exponent) == exponent) return false;
  }
  return true;
}

#if defined(__x86_64__)
/// Inspects elements from the first on, as many as fill whole vectors, until one is not finite.
/// \return the number of elements known to be finite.
template <std::unsigned_integral Word>
[[gnu::target("avx2,fma,f16c")]] std::int64_t finite_prefix(const std::byte* data,
                                                            std::int64_t count, Word exponent) {
  typedef Word vector __attribute__((vector_size(32)));
  constexpr std::int64_t step = 32 / sizeof(Word);
  const vector mask = vector{} + exponent;

  std::int64_t i = 0;
  for (; i + 4 * step <= count; i += 4 * step) {
    const auto* words =
        reinterpret_cast<const __m256i_u*>(data + i * static_cast<std::int64_t>(sizeof(Word)));
    const auto a = reinterpret_cast<vector>(_mm256_loadu_si256(words)) & mask;
    const auto b = reinterpret_cast<vector>(_mm256_loadu_si256(words + 1)) & mask;
    const auto c = reinterpret_cast<vector>(_mm256_loadu_si256(words + 2)) & mask;
    const auto d = reinterpret_cast<vector>(_mm256_loadu_si256(words + 3)) & mask;
    const auto bad = (a == mask) | (b == mask) | (c == mask) | (d == mask);
    const auto bits = reinterpret_cast<__m256i>(bad);
    if (_mm256_testz_si256(bits, bits) == 0) break;
  }
  return i;
}
#endif

template <std::unsigned_integral Word>
[[nodiscard]] bool all_finite(instruction_set instructions, const_buffer values, Word exponent) {
  std::int64_t known = 0;
#if defined(__x86_64__)
  if (instructions == instruction_set::avx2)
    known = finite_prefix(values.data, values.count, exponent);
#else
  static_cast<void>(instructions);
#endif
  return all_finite_each(values.data, known, values.count, exponent);
}

[[nodiscard]] inline bool all_finite(instruction_set instructions, const_buffer values) {
  switch (values.type) {
    case dtype::float16: return all_finite(instructions, values, std::uint16_t{0x7C00});
    case dtype::bfloat16: return all_finite(instructions, values, std::uint16_t{0x7F80});
    case dtype::float32: return all_finite(instructions, values, std::uint32_t{0x7F800000});
    default: return all_finite(instructions, values, std::uint64_t{0x7FF0000000000000});
  }
}

}  // namespace detail

/// \return whether no value is infinite or not a number. Stops at the first that is.
/// \throws usage_error if the dtype is not floating.
[[nodiscard]] inline bool all_finite(const_buffer values) {
  expects(is_floating(values.type), "kernel::all_finite: dtype must be floating, got ",
          values.type);
  return detail::all_finite(detail::fastest_instruction_set(), values);
}

}  // namespace bluefog::kernel
