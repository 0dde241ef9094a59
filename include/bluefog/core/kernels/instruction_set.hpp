// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace bluefog::kernel::detail {

/// The instructions that a kernel may use. Results do not depend on it.
enum class instruction_set {
  portable,  ///< what the compiler was told to use
  avx2       ///< AVX2, FMA and F16C, whatever the compiler was told
};

/// \return the best that this processor has.
[[nodiscard]] inline instruction_set fastest_instruction_set() noexcept {
#if defined(__x86_64__)
  // F16C is older than AVX2: every processor that has the one has the other.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return instruction_set::avx2;
#endif
  return instruction_set::portable;
}

}  // namespace bluefog::kernel::detail
