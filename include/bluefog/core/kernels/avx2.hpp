// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__x86_64__)

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <immintrin.h>

#include <bluefog/core/dtype.hpp>
#include <bluefog/core/kernels/element.hpp>
#include <bluefog/core/reduce_op.hpp>

/// Vectors of elements in AVX2 registers.
///
/// Only functions with the same `target` attribute may use them, and must themselves be called only
/// where `fastest_instruction_set` says so.
namespace bluefog::kernel::detail::avx2 {

/// Asks for the `Bytes` that come some way after those at `data`, which the caller is reading.
///
/// With several arrays at once the processor foresees less by itself; measured gains are 3 to 15 %.
/// The address may lie outside of the array: asking for it has no other effect.
template <std::int64_t Bytes>
[[gnu::always_inline]] inline void prefetch(const std::byte* data) noexcept {
  constexpr std::uintptr_t ahead = 2048;
  constexpr std::uintptr_t line = 64;
  const auto address = reinterpret_cast<std::uintptr_t>(data) + ahead;
  __builtin_prefetch(reinterpret_cast<const void*>(address));
  if constexpr (Bytes > std::int64_t{line})
    __builtin_prefetch(reinterpret_cast<const void*>(address + line));
}

/// Arithmetic on eight floats, as `combine` defines it.
struct float_lanes {
  using vector = __m256;
  static constexpr int width = 8;

  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector broadcast(
      double value) noexcept {
    return _mm256_set1_ps(static_cast<float>(value));
  }
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector multiply(
      vector a, vector b) noexcept {
    return _mm256_mul_ps(a, b);
  }
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector divide(
      vector a, vector b) noexcept {
    return _mm256_div_ps(a, b);
  }
  /// \return a b + c, rounded once.
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector fused_multiply_add(
      vector a, vector b, vector c) noexcept {
    return _mm256_fmadd_ps(a, b, c);
  }
  template <reduce_op Op>
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector combine(
      vector a, vector b) noexcept {
    if constexpr (Op == reduce_op::product) return _mm256_mul_ps(a, b);
    if constexpr (Op == reduce_op::sum) return _mm256_add_ps(a, b);
    // The instruction answers with `b` if either is not a number.
    const vector chosen = Op == reduce_op::min ? _mm256_min_ps(a, b) : _mm256_max_ps(a, b);
    return _mm256_blendv_ps(chosen, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
};

/// Arithmetic on four doubles, as `combine` defines it.
struct double_lanes {
  using vector = __m256d;
  static constexpr int width = 4;

  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector broadcast(
      double value) noexcept {
    return _mm256_set1_pd(value);
  }
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector multiply(
      vector a, vector b) noexcept {
    return _mm256_mul_pd(a, b);
  }
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector divide(
      vector a, vector b) noexcept {
    return _mm256_div_pd(a, b);
  }
  /// \return a b + c, rounded once.
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector fused_multiply_add(
      vector a, vector b, vector c) noexcept {
    return _mm256_fmadd_pd(a, b, c);
  }
  template <reduce_op Op>
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector combine(
      vector a, vector b) noexcept {
    if constexpr (Op == reduce_op::product) return _mm256_mul_pd(a, b);
    if constexpr (Op == reduce_op::sum) return _mm256_add_pd(a, b);
    const vector chosen = Op == reduce_op::min ? _mm256_min_pd(a, b) : _mm256_max_pd(a, b);
    return _mm256_blendv_pd(chosen, a, _mm256_cmp_pd(a, a, _CMP_UNORD_Q));
  }
};

/// A vector of `T` in the type it is computed in: arithmetic, and how it meets memory.
///
/// The primary template serves the integers and bool, in the compiler's own vector types.
template <element T>
struct lanes {
  using integer = stored_t<T>;
  typedef integer vector __attribute__((vector_size(32)));
  typedef std::make_unsigned_t<integer> unsigned_vector __attribute__((vector_size(32)));
  static constexpr int width = 32 / static_cast<int>(sizeof(T));

  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector load(
      const std::byte* data) noexcept {
    return reinterpret_cast<vector>(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(data)));
  }
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline void store(
      std::byte* data, vector value) noexcept {
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(data), reinterpret_cast<__m256i>(value));
  }
  template <reduce_op Op>
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector combine(
      vector a, vector b) noexcept {
    if constexpr (Op == reduce_op::min) return a < b ? a : b;
    if constexpr (Op == reduce_op::max) return a > b ? a : b;
    const auto x = reinterpret_cast<unsigned_vector>(a);  // wraps
    const auto y = reinterpret_cast<unsigned_vector>(b);
    return reinterpret_cast<vector>(Op == reduce_op::sum ? x + y : x * y);
  }
};

template <>
struct lanes<float> : float_lanes {
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector load(
      const std::byte* data) noexcept {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(data));
  }
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline void store(
      std::byte* data, vector value) noexcept {
    _mm256_storeu_ps(reinterpret_cast<float*>(data), value);
  }
};

template <>
struct lanes<double> : double_lanes {
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector load(
      const std::byte* data) noexcept {
    return _mm256_loadu_pd(reinterpret_cast<const double*>(data));
  }
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline void store(
      std::byte* data, vector value) noexcept {
    _mm256_storeu_pd(reinterpret_cast<double*>(data), value);
  }
};

template <>
struct lanes<float16> : float_lanes {
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector load(
      const std::byte* data) noexcept {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(data)));
  }
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline void store(
      std::byte* data, vector value) noexcept {
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(data),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

template <>
struct lanes<bfloat16> : float_lanes {
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline vector load(
      const std::byte* data) noexcept {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(data));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] static inline void store(
      std::byte* data, vector value) noexcept {
    const __m256i words = _mm256_castps_si256(value);
    const __m256i upper = _mm256_srli_epi32(words, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(words, bias), 16);
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i result = _mm256_blendv_epi8(rounded, quiet, nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0b1000);
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(data), _mm256_castsi256_si128(packed));
  }
};

}  // namespace bluefog::kernel::detail::avx2

#endif
