// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <source_location>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <bluefog/topology/neighborhood.hpp>

#include "support/ranks.hpp"

namespace bluefog_test {

/// The tensor that rank `rank` contributes: small integers, exact in every type.
inline at::Tensor sample(int rank, at::IntArrayRef sizes, at::ScalarType type = at::kDouble) {
  const auto count = c10::multiply_integers(sizes);
  return (at::arange(count, at::kLong).remainder(5) + rank + 1).to(type).reshape(sizes);
}

/// The samples of all ranks, along a new first dimension.
inline at::Tensor samples(int ranks, at::IntArrayRef sizes, at::ScalarType type = at::kDouble) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(sample(rank, sizes, type));
  return at::stack(all);
}

/// \return a rank's part of a graph in which rank 0 hears all others, the last one first, and the
///         others hear nobody.
inline bluefog::neighborhood all_to_first(int rank, int size) {
  if (rank > 0) return {.destinations = {{0}}};
  bluefog::neighborhood links;
  for (int source = size - 1; source > 0; --source) links.sources.push_back({source});
  return links;
}

/// Checks type, shape and values.
inline void require_tensor(const at::Tensor& got, const at::Tensor& wanted, double tolerance = 0,
                           std::source_location where = std::source_location::current()) {
  const auto values = [&] {  // only then: writing tensors takes longer than most operations
    std::ostringstream text;
    text << "got " << got.detach().contiguous() << "\nwanted " << wanted.detach().contiguous();
    return text.str();
  };
  if (got.scalar_type() != wanted.scalar_type() || got.sizes() != wanted.sizes())
    fail_here("type or shape differ: " + values(), where);
  if (got.numel() == 0) return;
  const auto difference =
      (got.detach().to(at::kDouble) - wanted.detach().to(at::kDouble)).abs().max().item<double>();
  if (!(difference <= tolerance)) fail_here(values(), where);
}

/// One logical tensor in one arrangement in memory.
struct arrangement {
  std::string name;
  at::Tensor tensor;
};

/// `values`, two-dimensional or four-dimensional, in every arrangement that has its shape.
inline std::vector<arrangement> arrangements(const at::Tensor& values) {
  std::vector<arrangement> all{{"contiguous", values.clone()}};
  const auto wide = [&] {
    return at::full({values.size(0), 2 * values.size(1)}, -7, values.options());
  };
  if (values.dim() == 2) {
    all.push_back({"x.t()", values.t().contiguous().t()});
    all.push_back({"every other column", wide().slice(1, 0, {}, 2).copy_(values)});
    all.push_back({"the left half", wide().slice(1, 0, values.size(1)).copy_(values)});
  } else {
    all.push_back({"channels last", values.contiguous(at::MemoryFormat::ChannelsLast)});
    all.push_back({"permuted", values.permute({3, 1, 0, 2}).contiguous().permute({2, 1, 3, 0})});
  }
  return all;
}

}  // namespace bluefog_test
