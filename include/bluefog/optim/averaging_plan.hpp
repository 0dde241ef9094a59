// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include <bluefog/optim/options.hpp>
#include <bluefog/optim/pass_counter.hpp>

namespace bluefog::optim::detail {

/// What passes are to an averaging wrapper.
enum class counted : std::uint8_t { forwards, backwards };

/// How an averaging wrapper counts and sends.
struct averaging_plan {
  std::string_view optimizer;  ///< the wrapper's name; static storage
  pass_counter counter;
  counted passes;
  communication_type communication;
  std::int64_t bucket_bytes;
  int global_average_every = 0;
  buffer_policy buffers = buffer_policy::local;
  optim::start start = optim::start::at_step;
};

}  // namespace bluefog::optim::detail
