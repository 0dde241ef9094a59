// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels/avx2.hpp>
#include <bluefog/core/kernels/element.hpp>
#include <bluefog/core/kernels/instruction_set.hpp>
#include <bluefog/core/reduce_op.hpp>

namespace bluefog::kernel {
namespace detail {

/// \return one step of a reduction. Integers wrap; what is not a number stays so.
template <reduce_op Op, class Computed>
[[nodiscard]] constexpr Computed combine(Computed a, Computed b) noexcept {
  if constexpr (Op == reduce_op::min) return a != a || a < b ? a : b;
  if constexpr (Op == reduce_op::max) return a != a || a > b ? a : b;
  if constexpr (std::is_integral_v<Computed>) {
    const auto x = static_cast<std::uint64_t>(a);
    const auto y = static_cast<std::uint64_t>(b);
    return static_cast<Computed>(Op == reduce_op::sum ? x + y : x * y);
  } else {
    return Op == reduce_op::sum ? a + b : a * b;
  }
}

/// Reduces elements [first, out.count), then divides by `divisor` if `Average`.
template <element T, reduce_op Op, bool Average>
void reduce_each(mutable_buffer out, std::span<const const_buffer> inputs, std::int64_t first) {
  for (std::int64_t i = first; i < out.count; ++i) {
    computed_t<T> result = load<T>(inputs.front().data, i);
    for (const const_buffer& input : inputs.subspan(1))
      result = combine<Op>(result, load<T>(input.data, i));
    if constexpr (Average) result /= static_cast<computed_t<T>>(inputs.size());
    store<T>(out.data, i, result);
  }
}

#if defined(__x86_64__)
/// Reduces as many elements as fill whole vectors, in one pass. \return their number.
template <element T, reduce_op Op, bool Average>
[[gnu::target("avx2,fma,f16c")]] std::int64_t reduce_vectors(mutable_buffer out,
                                                             std::span<const const_buffer> inputs) {
  using lanes = avx2::lanes<T>;
  constexpr auto step = std::int64_t{lanes::width};
  constexpr auto bytes = step * std::int64_t{sizeof(T)};
  const std::byte* front = inputs.front().data;
  const auto rest = inputs.subspan(1);

  std::int64_t i = 0;
  for (; i + 4 * step <= out.count; i += 4 * step) {
    const std::int64_t offset = i * std::int64_t{sizeof(T)};
    avx2::prefetch<4 * bytes>(front + offset);
    auto a = lanes::load(front + offset);
    auto b = lanes::load(front + offset + bytes);
    auto c = lanes::load(front + offset + 2 * bytes);
    auto d = lanes::load(front + offset + 3 * bytes);
    for (const const_buffer& input : rest) {
      avx2::prefetch<4 * bytes>(input.data + offset);
      a = lanes::template combine<Op>(a, lanes::load(input.data + offset));
      b = lanes::template combine<Op>(b, lanes::load(input.data + offset + bytes));
      c = lanes::template combine<Op>(c, lanes::load(input.data + offset + 2 * bytes));
      d = lanes::template combine<Op>(d, lanes::load(input.data + offset + 3 * bytes));
    }
    if constexpr (Average) {
      const auto divisor = lanes::broadcast(static_cast<double>(inputs.size()));
      a = lanes::divide(a, divisor);
      b = lanes::divide(b, divisor);
      c = lanes::divide(c, divisor);
      d = lanes::divide(d, divisor);
    }
    lanes::store(out.data + offset, a);
    lanes::store(out.data + offset + bytes, b);
    lanes::store(out.data + offset + 2 * bytes, c);
    lanes::store(out.data + offset + 3 * bytes, d);
  }
  return i;
}
#endif

template <element T, reduce_op Op, bool Average = false>
void reduce(instruction_set instructions, mutable_buffer out,
            std::span<const const_buffer> inputs) {
  std::int64_t done = 0;
#if defined(__x86_64__)
  if (instructions == instruction_set::avx2) done = reduce_vectors<T, Op, Average>(out, inputs);
#else
  static_cast<void>(instructions);
#endif
  reduce_each<T, Op, Average>(out, inputs, done);
}

/// Turns the run-time `op` into a compile-time one. `average` needs a floating `T`.
template <element T>
void reduce(instruction_set instructions, reduce_op op, mutable_buffer out,
            std::span<const const_buffer> inputs) {
  constexpr bool boolean = std::is_same_v<T, bool>;
  constexpr reduce_op sum = boolean ? reduce_op::max : reduce_op::sum;
  constexpr reduce_op product = boolean ? reduce_op::min : reduce_op::product;
  switch (op) {
    case reduce_op::sum: return reduce<T, sum>(instructions, out, inputs);
    case reduce_op::product: return reduce<T, product>(instructions, out, inputs);
    case reduce_op::min: return reduce<T, reduce_op::min>(instructions, out, inputs);
    case reduce_op::max: return reduce<T, reduce_op::max>(instructions, out, inputs);
    case reduce_op::average:
      if constexpr (floating_element<T>)
        return reduce<T, reduce_op::sum, true>(instructions, out, inputs);
  }
}

}  // namespace detail

/// Combines the inputs elementwise, from the first to the last, in one pass.
///
/// Halves are combined in float32 over all inputs and rounded once. Integers wrap. On bool, `sum`
/// and `max` are "any", `min` and `product` are "all". If one of the values is not a number, nor is
/// the result.
///
/// \param op      `average` divides the sum by `inputs.size()`, and needs a floating dtype.
/// \param out     n elements of any dtype; may be one of the inputs, not overlap them otherwise.
/// \param inputs  at least one buffer of n elements of that dtype.
/// \throws usage_error if there is no input, an input differs from `out`, or `op` does not apply.
/// \note Reads and writes n (inputs.size() + 1) elements. Allocates nothing.
inline void reduce(reduce_op op, mutable_buffer out, std::span<const const_buffer> inputs) {
  expects(!inputs.empty(), "kernel::reduce: needs at least one input");
  expects(op != reduce_op::average || is_floating(out.type),
          "kernel::reduce: average needs a floating dtype, got ", out.type);
  for (const const_buffer& input : inputs)
    expects(input.type == out.type && input.count == out.count, "kernel::reduce: out has ",
            out.count, " elements of ", out.type, ", an input ", input.count, " of ", input.type);
  with_type(out.type, [&]<class T>() {
    detail::reduce<T>(detail::fastest_instruction_set(), op, out, inputs);
  });
}

}  // namespace bluefog::kernel
