// SPDX-License-Identifier: Apache-2.0
// The library's CUDA source as host code: what CUDA C++ has and C++ lacks is defined here.
#include "support/nccl_stand_in/kernels.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>

#include <bluefog/core/dtype.hpp>

namespace {

struct dimensions {
  unsigned x = 0;
};
thread_local dimensions blockIdx;
thread_local dimensions threadIdx;
constexpr dimensions gridDim{2};
constexpr dimensions blockDim{3};

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

#define __device__
#define __global__
#define __align__(bytes) alignas(bytes)
namespace source {
using ::fma;
using ::fmaf;
#include "kernel_source.inc"
}  // namespace source
#undef __device__
#undef __global__
#undef __align__

template <class Arguments>
Arguments copied(const void* arguments) {
  Arguments copy;
  std::memcpy(&copy, arguments, sizeof copy);
  return copy;
}

using bluefog_test::stand_in::kernel_memory;

std::size_t bytes_of(int type, source::i64 count) {
  return bluefog::size_of(static_cast<bluefog::dtype>(type)) * static_cast<std::size_t>(count);
}

std::vector<kernel_memory> memory_of(const source::mix_arguments& a) {
  const std::size_t bytes = bytes_of(a.type, a.count);
  std::vector<kernel_memory> all{{a.out, bytes}, {a.self, bytes}};
  for (int k = 0; k < a.inputs; ++k) all.push_back({a.data[k], bytes});
  return all;
}
std::vector<kernel_memory> memory_of(const source::reduce_arguments& a) {
  const std::size_t bytes = bytes_of(a.type, a.count);
  std::vector<kernel_memory> all{{a.out, bytes}};
  for (int k = 0; k < a.inputs; ++k) all.push_back({a.data[k], bytes});
  return all;
}
std::vector<kernel_memory> memory_of(const source::convert_arguments& a) {
  return {{a.out, bytes_of(a.out_type, a.count)}, {a.in, bytes_of(a.in_type, a.count)}};
}

template <class Arguments, void (*Kernel)(Arguments)>
constexpr bluefog_test::stand_in::host_kernel entry(const char* name) {
  return {name, sizeof(Arguments),
          [](const void* arguments) { Kernel(copied<Arguments>(arguments)); },
          [](const void* arguments) { return memory_of(copied<Arguments>(arguments)); }};
}

constexpr bluefog_test::stand_in::host_kernel table[] = {
    entry<source::mix_arguments, source::bluefog_mix>("bluefog_mix"),
    entry<source::reduce_arguments, source::bluefog_reduce>("bluefog_reduce"),
    entry<source::convert_arguments, source::bluefog_convert>("bluefog_convert"),
};

}  // namespace

namespace bluefog_test::stand_in {

const host_kernel* find_kernel(const char* name) {
  for (const host_kernel& each : table)
    if (std::string_view(name) == each.name) return &each;
  return nullptr;
}

void run_kernel(const host_kernel& it, const void* arguments) {
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) it.run(arguments);
}

}  // namespace bluefog_test::stand_in
