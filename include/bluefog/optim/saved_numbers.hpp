// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/serialize/archive.h>

#include <bluefog/optim/pass_counter.hpp>

namespace bluefog::optim::detail {

/// Writes a number beside what the user's optimizer writes.
inline void write_number(torch::serialize::OutputArchive& archive, const char* name,
                         std::int64_t number) {
  archive.write(name, at::full({}, number, at::kLong), /*is_buffer=*/true);
}
/// \return the number that `write_number` wrote; 0 if the archive has none of that name.
[[nodiscard]] inline std::int64_t read_number(torch::serialize::InputArchive& archive,
                                              const char* name) {
  at::Tensor saved;
  return archive.try_read(name, saved, /*is_buffer=*/true) ? saved.item<std::int64_t>() : 0;
}

/// Writes how far the window is: the passes of which steps have used the gradients. Those of the
/// others are in no archive.
inline void write_passes(torch::serialize::OutputArchive& archive, const pass_counter& counter) {
  write_number(archive, "bluefog_passes", counter.passes() - counter.unused());
}
/// Begins a window with the passes that `write_passes` wrote, as if no step had used them yet; one
/// fewer than J at most, should J have been larger.
inline void read_passes(torch::serialize::InputArchive& archive, pass_counter& counter) {
  counter.reset();
  const std::int64_t passes = read_number(archive, "bluefog_passes");
  while (counter.passes() < passes && counter.passes() + 1 < counter.wanted())
    counter.count("pass");
}

}  // namespace bluefog::optim::detail
