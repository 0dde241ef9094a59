// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/serialize/archive.h>

namespace bluefog::amp {

/// Who decides, with an averaging optimizer, whether a step is left out because of gradients that
/// are not finite.
enum class agreement : std::uint8_t {
  ranks,  ///< all ranks together in steps that communicate, each rank for itself in local steps
  local   ///< each rank for itself, always; scales may then differ, no flag is sent
};

/// Options of `grad_scaler`. The same on every rank.
struct grad_scaler_options {
  double init_scale = 65536;
  double growth_factor = 2;     ///< after `growth_interval` finite steps in a row; above 1
  double backoff_factor = 0.5;  ///< after a step that was left out; below 1
  std::int64_t growth_interval = 2000;
  bool enabled = true;  ///< false: scales nothing, leaves out nothing
  amp::agreement agreement = amp::agreement::ranks;
};

/// What a `grad_scaler` has to keep from one run to the next.
struct grad_scaler_state {
  double scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  std::int64_t growth_tracker = 0;
  bool overflowed = false;  ///< this rank, in a local step of which no other rank knows yet

  friend bool operator==(const grad_scaler_state&, const grad_scaler_state&) = default;

  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const grad_scaler_state& state) {
    const auto write = [&](const char* key, auto value) {
      constexpr auto type = std::integral<decltype(value)> ? at::kLong : at::kDouble;
      archive.write(key, at::full({}, value, type), /*is_buffer=*/true);
    };
    write("scale", state.scale);
    write("growth_factor", state.growth_factor);
    write("backoff_factor", state.backoff_factor);
    write("growth_interval", state.growth_interval);
    write("growth_tracker", state.growth_tracker);
    write("overflowed", state.overflowed);
    return archive;
  }
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    grad_scaler_state& state) {
    const auto read = [&]<class Value>(const char* key, Value& value) {
      at::Tensor saved;
      archive.read(key, saved, /*is_buffer=*/true);
      value = saved.item<Value>();
    };
    read("scale", state.scale);
    read("growth_factor", state.growth_factor);
    read("backoff_factor", state.backoff_factor);
    read("growth_interval", state.growth_interval);
    read("growth_tracker", state.growth_tracker);
    at::Tensor overflowed;  // older archives lack it
    state.overflowed =
        archive.try_read("overflowed", overflowed, /*is_buffer=*/true) && overflowed.item<bool>();
    return archive;
  }
};

}  // namespace bluefog::amp
