// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels/avx2.hpp>
#include <bluefog/core/kernels/element.hpp>
#include <bluefog/core/kernels/instruction_set.hpp>

namespace bluefog::kernel {

/// An array to be added, and its factor. Same count and dtype as the buffer it is added to.
struct weighted_input {
  double weight;
  const std::byte* data;
};

namespace detail {

/// Mixes elements [first, out.count).
template <floating_element T>
void mix_each(mutable_buffer out, double self_weight, const std::byte* self,
              std::span<const weighted_input> inputs, std::int64_t first) {
  using computed = computed_t<T>;
  for (std::int64_t i = first; i < out.count; ++i) {
    computed sum = static_cast<computed>(self_weight) * load<T>(self, i);
    for (const weighted_input& input : inputs)
      sum = std::fma(static_cast<computed>(input.weight), load<T>(input.data, i), sum);
    store<T>(out.data, i, sum);
  }
}

#if defined(__x86_64__)
/// Mixes as many elements as fill whole vectors. \return their number.
///
/// Reads all inputs of one tile before it writes that tile: one pass over memory for any number of
/// inputs, and `out` may be one of them.
///
/// \tparam Inputs  a range of `weighted_input`; an array tells the compiler their number.
template <floating_element T, class Inputs>
[[gnu::target("avx2,fma,f16c")]] std::int64_t mix_vectors(mutable_buffer out, double self_weight,
                                                          const std::byte* self, Inputs inputs) {
  using lanes = avx2::lanes<T>;
  constexpr auto step = std::int64_t{lanes::width};
  constexpr auto bytes = step * std::int64_t{sizeof(T)};
  const auto own = lanes::broadcast(self_weight);

  std::int64_t i = 0;
  for (; i + 4 * step <= out.count; i += 4 * step) {
    const std::int64_t offset = i * std::int64_t{sizeof(T)};
    avx2::prefetch<4 * bytes>(self + offset);
    auto a = lanes::multiply(own, lanes::load(self + offset));
    auto b = lanes::multiply(own, lanes::load(self + offset + bytes));
    auto c = lanes::multiply(own, lanes::load(self + offset + 2 * bytes));
    auto d = lanes::multiply(own, lanes::load(self + offset + 3 * bytes));
    for (const weighted_input& input : inputs) {
      avx2::prefetch<4 * bytes>(input.data + offset);
      const auto weight = lanes::broadcast(input.weight);
      a = lanes::fused_multiply_add(weight, lanes::load(input.data + offset), a);
      b = lanes::fused_multiply_add(weight, lanes::load(input.data + offset + bytes), b);
      c = lanes::fused_multiply_add(weight, lanes::load(input.data + offset + 2 * bytes), c);
      d = lanes::fused_multiply_add(weight, lanes::load(input.data + offset + 3 * bytes), d);
    }
    lanes::store(out.data + offset, a);
    lanes::store(out.data + offset + bytes, b);
    lanes::store(out.data + offset + 2 * bytes, c);
    lanes::store(out.data + offset + 3 * bytes, d);
  }
  for (; i + step <= out.count; i += step) {
    const std::int64_t offset = i * std::int64_t{sizeof(T)};
    auto sum = lanes::multiply(own, lanes::load(self + offset));
    for (const weighted_input& input : inputs)
      sum = lanes::fused_multiply_add(lanes::broadcast(input.weight),
                                      lanes::load(input.data + offset), sum);
    lanes::store(out.data + offset, sum);
  }
  return i;
}
#endif

template <floating_element T>
void mix(instruction_set instructions, mutable_buffer out, double self_weight,
         const std::byte* self, std::span<const weighted_input> inputs) {
  std::int64_t done = 0;
#if defined(__x86_64__)
  if (instructions == instruction_set::avx2)
    done = inputs.size() == 1 ? mix_vectors<T>(out, self_weight, self, std::array{inputs.front()})
                              : mix_vectors<T>(out, self_weight, self, inputs);
#else
  static_cast<void>(instructions);
#endif
  mix_each<T>(out, self_weight, self, inputs, done);
}

}  // namespace detail

/// Computes the weighted sum \f[ out = w \, self + \sum_j w_j \, input_j \f] in one pass.
///
/// Halves are summed in float32 and rounded once, the others in their own type; every product but
/// the first is fused with its sum.
///
/// \param out          n elements, floating; may be `self` or one of the inputs, not overlap them
///                     otherwise.
/// \param self_weight  w.
/// \param self         n elements of the dtype of `out`.
/// \param inputs       any number of arrays of n elements of that dtype, with their weights.
/// \throws usage_error if the dtype is not floating or `self` differs from `out`.
/// \note Reads and writes n (inputs.size() + 2) elements. Allocates nothing.
inline void mix(mutable_buffer out, double self_weight, const_buffer self,
                std::span<const weighted_input> inputs) {
  expects(is_floating(out.type), "kernel::mix: dtype must be floating, got ", out.type);
  expects(self.type == out.type && self.count == out.count, "kernel::mix: out has ", out.count,
          " elements of ", out.type, ", self ", self.count, " of ", self.type);
  detail::with_floating_type(out.type, [&]<class T>() {
    detail::mix<T>(detail::fastest_instruction_set(), out, self_weight, self.data, inputs);
  });
}

/// Multiplies `values`, floating, by `factor` in place.
/// \throws usage_error if the dtype is not floating.
inline void scale(mutable_buffer values, double factor) {
  expects(is_floating(values.type), "kernel::scale: dtype must be floating, got ", values.type);
  mix(values, factor, values, {});
}

/// Computes out = factor in.
///
/// \param out  n elements, floating; does not overlap `in`.
/// \param in   n elements of the same dtype.
/// \throws usage_error if the dtype is not floating or the two differ in it or in length.
inline void scaled_copy(mutable_buffer out, const_buffer in, double factor) {
  expects(is_floating(out.type), "kernel::scaled_copy: dtype must be floating, got ", out.type);
  expects(in.type == out.type && in.count == out.count, "kernel::scaled_copy: out has ", out.count,
          " elements of ", out.type, ", in ", in.count, " of ", in.type);
  mix(out, factor, in, {});
}

}  // namespace bluefog::kernel
