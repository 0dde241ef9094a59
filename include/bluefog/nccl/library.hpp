// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <unistd.h>

#include <bluefog/core/error.hpp>
#include <bluefog/nccl/check.hpp>
#include <bluefog/nccl/handle.hpp>

namespace bluefog::nccl {

/// NCCL and the CUDA runtime themselves, and the machine that they see.
class library {
 public:
  /// \throws usage_error if the NCCL that the loader found is not the one compiled for, or too old.
  static void expects_matching_version() {
    int found = 0;
    check(ncclGetVersion(&found), "ncclGetVersion");
    constexpr int per_major = 10000;
    expects(found / per_major == NCCL_MAJOR && found >= NCCL_VERSION_CODE,
            "nccl_backend: compiled for NCCL ", version_text(NCCL_VERSION_CODE), ", but NCCL ",
            version_text(found),
            " was loaded; the loader has to find one that is at least as new (LD_LIBRARY_PATH)");
  }

  /// \return how many devices this process sees; 0 without a driver.
  [[nodiscard]] static int device_count() noexcept {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return 0;
    }
    return count;
  }

  /// \return the device's UUID, as nvidia-smi writes it.
  [[nodiscard]] static std::string device_uuid(int device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    std::string text = "GPU-";
    for (std::size_t i = 0; i < sizeof properties.uuid.bytes; ++i) {
      std::array<char, 3> digits{};
      const auto byte = static_cast<unsigned char>(properties.uuid.bytes[i]);
      std::snprintf(digits.data(), digits.size(), "%02x", static_cast<unsigned>(byte));
      if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
      text += digits.data();
    }
    return text;
  }

  /// \return what tells this host from others: its name, and which start of its system this is.
  [[nodiscard]] static std::string host() {
    std::array<char, 256> name{};
    if (gethostname(name.data(), name.size() - 1) != 0) name = {"unknown"};
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    return std::string(name.data()) + "/" + boot;
  }

  /// \return whether `data` lies in a device's memory. Memory that CUDA does not know is the
  ///         host's. Takes a context on the current device.
  [[nodiscard]] static bool on_device(const void* data) {
    if (data == nullptr) return false;
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
    return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  }

 private:
  [[nodiscard]] static std::string version_text(int code) {
    return concat(code / 10000, ".", code / 100 % 100, ".", code % 100);
  }
};

}  // namespace bluefog::nccl
