// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace bluefog::nccl {

/// The library's kernels for device memory, in CUDA C++.
///
/// They are compiled when a process first needs them, by NVRTC, for the device that it has: so a
/// program that includes these headers is compiled by any C++ compiler and needs no nvcc, nothing
/// is prebuilt, and no torch is needed. They compute what `bluefog::kernel` computes on the host,
/// bit for bit. The structures are those of `nccl/kernels.hpp`.
///
/// Not here is what libtorch does to its own tensors in one pass: scaling into another type, as
/// compressed gradients need it (`optim/scaled_copy.hpp`), and unscaling with a look at whether all
/// is finite (`amp/unscale.hpp`). Both work on every backend, with CUDA tensors of any arrangement.
///
/// What a C++ compiler lacks are the names that begin with two underscores, and the variables that
/// number threads: the tests define those and run this text on the host.
inline constexpr char kernel_source[] = R"cuda(
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

enum { type_bool, type_uint8, type_int8, type_int16, type_int32, type_int64, type_float16,
       type_bfloat16, type_float32, type_float64 };
enum { op_sum, op_product, op_min, op_max };
enum { most_inputs = 240 };

struct mix_arguments {
  void* out;
  const void* self;
  i64 count;
  double self_weight;
  int type;
  int inputs;
  const void* data[most_inputs];
  double weights[most_inputs];
};
struct reduce_arguments {
  void* out;
  i64 count;
  int type;
  int op;
  int inputs;
  int divisor;  // of the result; 0: none
  const void* data[most_inputs];
};
struct convert_arguments {
  void* out;
  const void* in;
  i64 count;
  int out_type;
  int in_type;
};

struct half_bits { u16 bits; };
struct brain_bits { u16 bits; };

// In which type an element is computed with.
template <class T> struct computed { typedef T type; };
template <> struct computed<half_bits> { typedef float type; };
template <> struct computed<brain_bits> { typedef float type; };

template <class T> __device__ T widen(T value) { return value; }
__device__ inline float widen(brain_bits value) { return __uint_as_float((u32)value.bits << 16); }
__device__ inline float widen(half_bits value) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  const u32 sign = (u32)(value.bits & 0x8000u) << 16;
  const u32 magnitude = value.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  if (magnitude >= 0x400u) return __uint_as_float(sign | ((magnitude << 13) + (112u << 23)));
  const float small = (float)magnitude * 5.9604644775390625e-8f;
  return sign ? -small : small;
#endif
}

template <class T> struct narrow { __device__ static T from(T value) { return value; } };
template <> struct narrow<brain_bits> {
  __device__ static brain_bits from(float value) {
    const u32 word = __float_as_uint(value);
    brain_bits made;
    made.bits = (word & 0x7FFFFFFFu) > 0x7F800000u ? (u16)((word >> 16) | 0x40u)
                                                   : (u16)((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16);
    return made;
  }
};
template <> struct narrow<half_bits> {
  __device__ static half_bits from(float value) {
    half_bits made;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(made.bits) : "f"(value));
#else
    const u32 word = __float_as_uint(value);
    const u32 sign = (word >> 16) & 0x8000u;
    const u32 magnitude = word & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) made.bits = (u16)(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
    else if (magnitude >= 0x477FF000u) made.bits = (u16)(sign | 0x7C00u);
    else if (magnitude < 0x38800000u)
      made.bits = (u16)(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3F000000u));
    else made.bits = (u16)(sign | ((magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13));
#endif
    return made;
  }
};

__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// Sixteen bytes, which a thread reads and writes at once.
template <class T> struct __align__(16) pack { T lanes[16 / sizeof(T)]; };

__device__ inline bool is_aligned(const void* data) { return (u64)data % 16 == 0; }
__device__ inline i64 first_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline i64 index_step() { return (i64)gridDim.x * blockDim.x; }

// Writes values.at(i) for every element i, or values.pack_at(i) for sixteen bytes at once where all
// arrays are aligned.
template <class T, class Values>
__device__ void write_all(void* out, i64 count, bool aligned, const Values& values) {
  const int lanes = 16 / sizeof(T);
  const i64 packs = aligned ? count / lanes : 0;
  for (i64 i = first_index(); i < packs; i += index_step()) ((pack<T>*)out)[i] = values.pack_at(i);
  for (i64 i = packs * lanes + first_index(); i < count; i += index_step()) ((T*)out)[i] = values.at(i);
}

template <class T> struct mixed {
  typedef typename computed<T>::type wide;
  const mix_arguments& a;

  __device__ T at(i64 i) const {
    wide sum = (wide)a.self_weight * widen(((const T*)a.self)[i]);
    for (int k = 0; k < a.inputs; ++k)
      sum = multiply_add((wide)a.weights[k], widen(((const T*)a.data[k])[i]), sum);
    return narrow<T>::from(sum);
  }
  __device__ pack<T> pack_at(i64 i) const {
    const int lanes = 16 / sizeof(T);
    const pack<T> own = ((const pack<T>*)a.self)[i];
    wide sum[lanes];
    for (int l = 0; l < lanes; ++l) sum[l] = (wide)a.self_weight * widen(own.lanes[l]);
    for (int k = 0; k < a.inputs; ++k) {
      const pack<T> input = ((const pack<T>*)a.data[k])[i];
      for (int l = 0; l < lanes; ++l)
        sum[l] = multiply_add((wide)a.weights[k], widen(input.lanes[l]), sum[l]);
    }
    pack<T> result;
    for (int l = 0; l < lanes; ++l) result.lanes[l] = narrow<T>::from(sum[l]);
    return result;
  }
};

template <class T> __device__ void mix(const mix_arguments& a) {
  bool aligned = is_aligned(a.out) && is_aligned(a.self);
  for (int k = 0; k < a.inputs; ++k) aligned = aligned && is_aligned(a.data[k]);
  const mixed<T> values = {a};
  write_all<T>(a.out, a.count, aligned, values);
}

#ifndef __CUDA_ARCH__
#define __launch_bounds__(...)
#endif
// As many threads as a processor can hold: while they wait for memory, that has enough to do.
extern "C" __global__ void __launch_bounds__(256, 8) bluefog_mix(const mix_arguments a) {
  switch (a.type) {
    case type_float16: return mix<half_bits>(a);
    case type_bfloat16: return mix<brain_bits>(a);
    case type_float32: return mix<float>(a);
    case type_float64: return mix<double>(a);
  }
}

// Integers wrap; what is not a number stays so.
template <class T> struct arithmetic {
  __device__ static T sum(T a, T b) { return (T)((u64)a + (u64)b); }
  __device__ static T product(T a, T b) { return (T)((u64)a * (u64)b); }
};
template <> struct arithmetic<bool> {
  __device__ static bool sum(bool a, bool b) { return a || b; }
  __device__ static bool product(bool a, bool b) { return a && b; }
};
template <> struct arithmetic<float> {
  __device__ static float sum(float a, float b) { return a + b; }
  __device__ static float product(float a, float b) { return a * b; }
};
template <> struct arithmetic<double> {
  __device__ static double sum(double a, double b) { return a + b; }
  __device__ static double product(double a, double b) { return a * b; }
};

template <class T> __device__ T combine(int op, T a, T b) {
  switch (op) {
    case op_min: return a != a || a < b ? a : b;
    case op_max: return a != a || a > b ? a : b;
    case op_product: return arithmetic<T>::product(a, b);
  }
  return arithmetic<T>::sum(a, b);
}

template <class T> struct reduced {
  typedef typename computed<T>::type wide;
  const reduce_arguments& a;

  __device__ wide finish(wide value) const { return a.divisor == 0 ? value : (wide)(value / (wide)a.divisor); }
  __device__ T at(i64 i) const {
    wide result = widen(((const T*)a.data[0])[i]);
    for (int k = 1; k < a.inputs; ++k) result = combine(a.op, result, widen(((const T*)a.data[k])[i]));
    return narrow<T>::from(finish(result));
  }
  __device__ pack<T> pack_at(i64 i) const {
    const int lanes = 16 / sizeof(T);
    const pack<T> first = ((const pack<T>*)a.data[0])[i];
    wide result[lanes];
    for (int l = 0; l < lanes; ++l) result[l] = widen(first.lanes[l]);
    for (int k = 1; k < a.inputs; ++k) {
      const pack<T> input = ((const pack<T>*)a.data[k])[i];
      for (int l = 0; l < lanes; ++l) result[l] = combine(a.op, result[l], widen(input.lanes[l]));
    }
    pack<T> out;
    for (int l = 0; l < lanes; ++l) out.lanes[l] = narrow<T>::from(finish(result[l]));
    return out;
  }
};

template <class T> __device__ void reduce(const reduce_arguments& a) {
  bool aligned = is_aligned(a.out);
  for (int k = 0; k < a.inputs; ++k) aligned = aligned && is_aligned(a.data[k]);
  const reduced<T> values = {a};
  write_all<T>(a.out, a.count, aligned, values);
}

extern "C" __global__ void bluefog_reduce(const reduce_arguments a) {
  switch (a.type) {
    case type_bool: return reduce<bool>(a);
    case type_uint8: return reduce<unsigned char>(a);
    case type_int8: return reduce<signed char>(a);
    case type_int16: return reduce<short>(a);
    case type_int32: return reduce<int>(a);
    case type_int64: return reduce<i64>(a);
    case type_float16: return reduce<half_bits>(a);
    case type_bfloat16: return reduce<brain_bits>(a);
    case type_float32: return reduce<float>(a);
    case type_float64: return reduce<double>(a);
  }
}

// Rounds to odd: what it returns rounds to any shorter type as `value` itself would.
__device__ inline float round_to_odd(double value) {
  const float nearest = (float)value;
  const double back = nearest;
  const u32 bits = __float_as_uint(nearest);
  if (back == value || value != value || (bits & 1u)) return nearest;
  return __uint_as_float((back > value) == (value > 0) ? bits - 1 : bits + 1);
}

template <class Out, class In> __device__ void convert(const convert_arguments& a) {
  typedef typename computed<Out>::type wide;
  const bool twice = sizeof(Out) == 2 && sizeof(In) == 8;  // would round, to float and then to Out
  for (i64 i = first_index(); i < a.count; i += index_step()) {
    const In value = ((const In*)a.in)[i];
    ((Out*)a.out)[i] =
        narrow<Out>::from(twice ? (wide)round_to_odd((double)widen(value)) : (wide)widen(value));
  }
}

template <class Out> __device__ void convert_to(const convert_arguments& a) {
  switch (a.in_type) {
    case type_float16: return convert<Out, half_bits>(a);
    case type_bfloat16: return convert<Out, brain_bits>(a);
    case type_float32: return convert<Out, float>(a);
    case type_float64: return convert<Out, double>(a);
  }
}

extern "C" __global__ void bluefog_convert(const convert_arguments a) {
  switch (a.out_type) {
    case type_float16: return convert_to<half_bits>(a);
    case type_bfloat16: return convert_to<brain_bits>(a);
    case type_float32: return convert_to<float>(a);
    case type_float64: return convert_to<double>(a);
  }
}
)cuda";

}  // namespace bluefog::nccl
