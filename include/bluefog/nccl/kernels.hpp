// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <nvrtc.h>

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/nccl/check.hpp>
#include <bluefog/nccl/kernel_source.hpp>

namespace bluefog::nccl {

/// The structures of the kernels' source.
inline constexpr int most_inputs = 240;
struct mix_arguments {
  void* out;
  const void* self;
  std::int64_t count;
  double self_weight;
  int type;
  int inputs;
  std::array<const void*, most_inputs> data;
  std::array<double, most_inputs> weights;
};
struct reduce_arguments {
  void* out;
  std::int64_t count;
  int type;
  int op;
  int inputs;
  int divisor;
  std::array<const void*, most_inputs> data;
};
struct convert_arguments {
  void* out;
  const void* in;
  std::int64_t count;
  int out_type;
  int in_type;
};
static_assert(sizeof(mix_arguments) < 4096, "a kernel takes 4096 bytes of arguments");

/// \return the machine code of the kernels for one kind of device, e.g. 90 for compute capability
///         9.0. Needs no device.
[[nodiscard]] inline std::vector<char> compile_kernels(int architecture) {
  const auto checked = [](nvrtcResult code, const char* call) {
    if (code != NVRTC_SUCCESS)
      throw transport_error(concat(call, " failed with NVRTC error ", static_cast<int>(code), ": ",
                                   nvrtcGetErrorString(code)),
                            static_cast<int>(code));
  };
  nvrtcProgram program = nullptr;
  checked(nvrtcCreateProgram(&program, kernel_source, "bluefog_kernels.cu", 0, nullptr, nullptr),
          "nvrtcCreateProgram");
  const std::string option = concat("--gpu-architecture=sm_", architecture);
  // No product is fused with a sum but where the source says so: results are the host's.
  const std::array options{option.c_str(), "--fmad=false", "--std=c++17"};
  const nvrtcResult compiled =
      nvrtcCompileProgram(program, static_cast<int>(options.size()), options.data());
  std::vector<char> code;
  std::string log;
  std::size_t size = 0;
  if (compiled == NVRTC_SUCCESS && nvrtcGetCUBINSize(program, &size) == NVRTC_SUCCESS) {
    code.resize(size);
    checked(nvrtcGetCUBIN(program, code.data()), "nvrtcGetCUBIN");
  } else if (nvrtcGetProgramLogSize(program, &size) == NVRTC_SUCCESS) {
    log.resize(size);
    static_cast<void>(nvrtcGetProgramLog(program, log.data()));
  }
  static_cast<void>(nvrtcDestroyProgram(&program));
  if (code.empty())
    throw transport_error(
        concat("nvrtcCompileProgram failed with NVRTC error ", static_cast<int>(compiled), ": ",
               nvrtcGetErrorString(compiled), "\n", log),
        static_cast<int>(compiled));
  return code;
}

/// The kernels on one device, as `bluefog::kernel` names them: each gives work to a stream and
/// returns. All memory is the device's.
class kernels {
 public:
  /// \return those of `device`, which is the current one; compiled when they are first asked for.
  [[nodiscard]] static const kernels& of(int device) {
    static std::mutex mutex;
    static std::map<int, kernels> known;
    const std::scoped_lock lock(mutex);
    const auto found = known.find(device);
    return found != known.end() ? found->second
                                : known.emplace(device, kernels(device)).first->second;
  }

  /// As `kernel::mix`. Beyond `most_inputs` halves are rounded once per so many inputs.
  void mix(cudaStream_t stream, mutable_buffer out, double self_weight, const_buffer self,
           std::span<const kernel::weighted_input> inputs) const {
    do {
      const auto now = inputs.first(std::min<std::size_t>(inputs.size(), most_inputs));
      mix_arguments arguments{.out = out.data,
                              .self = self.data,
                              .count = out.count,
                              .self_weight = self_weight,
                              .type = static_cast<int>(out.type),
                              .inputs = static_cast<int>(now.size()),
                              .data = {},
                              .weights = {}};
      std::ranges::transform(now, arguments.data.begin(), &kernel::weighted_input::data);
      std::ranges::transform(now, arguments.weights.begin(), &kernel::weighted_input::weight);
      launch(mix_, stream, out.count, &arguments);
      inputs = inputs.subspan(now.size());
      self = out;
      self_weight = 1;
    } while (!inputs.empty());
  }

  /// As `kernel::reduce`. Beyond `most_inputs` halves are rounded once per so many inputs.
  /// \throws usage_error if `out` is an input beyond them.
  void reduce(cudaStream_t stream, reduce_op op, mutable_buffer out,
              std::span<const const_buffer> inputs) const {
    const int divisor = op == reduce_op::average ? static_cast<int>(inputs.size()) : 0;
    std::vector<const void*> sources;
    for (const const_buffer& each : inputs) sources.push_back(each.data);
    std::span<const void* const> left(sources);
    if (left.size() > most_inputs)
      expects(std::ranges::find(left.subspan(most_inputs), out.data) == left.end(),
              "nccl_backend: the result may be one of the first ", most_inputs, " inputs only");
    reduce_arguments arguments{.out = out.data,
                               .count = out.count,
                               .type = static_cast<int>(out.type),
                               .op = number_of(op),
                               .inputs = 0,
                               .divisor = 0,
                               .data = {}};
    while (!left.empty()) {
      const bool first = arguments.inputs == 0;
      const auto now =
          left.first(std::min<std::size_t>(left.size(), most_inputs - (first ? 0 : 1)));
      left = left.subspan(now.size());
      if (!first) arguments.data[0] = out.data;
      std::ranges::copy(now, arguments.data.begin() + (first ? 0 : 1));
      arguments.inputs = static_cast<int>(now.size()) + (first ? 0 : 1);
      arguments.divisor = left.empty() ? divisor : 0;
      launch(reduce_, stream, out.count, &arguments);
    }
  }

  /// Divides float32 or float64 values.
  void divide(cudaStream_t stream, mutable_buffer values, int divisor) const {
    reduce_arguments arguments{.out = values.data,
                               .count = values.count,
                               .type = static_cast<int>(values.type),
                               .op = number_of(reduce_op::sum),
                               .inputs = 1,
                               .divisor = divisor,
                               .data = {values.data}};
    launch(reduce_, stream, values.count, &arguments);
  }

  /// As `kernel::convert`.
  void convert(cudaStream_t stream, mutable_buffer out, const_buffer in) const {
    convert_arguments arguments{.out = out.data,
                                .in = in.data,
                                .count = out.count,
                                .out_type = static_cast<int>(out.type),
                                .in_type = static_cast<int>(in.type)};
    launch(convert_, stream, out.count, &arguments);
  }

 private:
  explicit kernels(int device) {
    int major = 0;
    int minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
          "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
          "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
    const auto code = compile_kernels(10 * major + minor);
    // Stays loaded for as long as the process runs, as do the kernels of a program made by nvcc.
    cudaLibrary_t loaded = nullptr;
    check(cudaLibraryLoadData(&loaded, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
          "cudaLibraryLoadData");
    check(cudaLibraryGetKernel(&mix_, loaded, "bluefog_mix"), "cudaLibraryGetKernel");
    check(cudaLibraryGetKernel(&reduce_, loaded, "bluefog_reduce"), "cudaLibraryGetKernel");
    check(cudaLibraryGetKernel(&convert_, loaded, "bluefog_convert"), "cudaLibraryGetKernel");
  }

  [[nodiscard]] static int number_of(reduce_op op) noexcept {
    switch (op) {
      case reduce_op::average:
      case reduce_op::sum: return 0;
      case reduce_op::product: return 1;
      case reduce_op::min: return 2;
      case reduce_op::max: return 3;
    }
    return 0;
  }

  void launch(cudaKernel_t kernel, cudaStream_t stream, std::int64_t count, void* arguments) const {
    if (count == 0) return;
    constexpr unsigned threads = 256;
    constexpr std::int64_t elements_per_thread = 4;
    // Whole rounds, whether a processor holds 1, 2, 3, 4, 6 or 8 blocks at a time.
    constexpr std::int64_t blocks_per_processor = 48;
    const auto blocks = std::min<std::int64_t>(
        (count + threads * elements_per_thread - 1) / (threads * elements_per_thread),
        blocks_per_processor * processors_);
    const dim3 grid{static_cast<unsigned>(blocks), 1, 1};
    check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3{threads, 1, 1},
                           &arguments, 0, stream),
          "cudaLaunchKernel");
  }

  int processors_ = 1;
  cudaKernel_t mix_ = nullptr;
  cudaKernel_t reduce_ = nullptr;
  cudaKernel_t convert_ = nullptr;
};

}  // namespace bluefog::nccl
