// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <ostream>
#include <string_view>

#include <bluefog/core/error.hpp>
#include <bluefog/core/reduce_op.hpp>

namespace bluefog::optim {

/// What the averaging wrappers do when it is time to communicate.
enum class communication_type : std::uint8_t {
  neighbor_allreduce,               ///< average with the neighbours of this round
  hierarchical_neighbor_allreduce,  ///< average within machines, then with neighbour machines
  allreduce,                        ///< average over all ranks
  none                              ///< go on alone
};

/// What to do if a pass comes after the one that should have been followed by a `step()`.
enum class miscount : std::uint8_t {
  warn,  ///< say it in the log, once per optimizer
  raise  ///< throw a `usage_error`
};

/// When an averaging wrapper starts to send.
enum class start : std::uint8_t {
  /// When the counted pass is known: overlaps with backward. Nothing else may change the parameters
  /// from then until `step()`.
  after_forward,
  at_step  ///< in `step()`: overlaps with nothing
};

/// Options of `adapt_with_combine`.
struct adapt_with_combine_options {
  /// J: communicate after every J-th forward of the model.
  int num_steps_per_communication = 1;
  optim::communication_type communication = communication_type::neighbor_allreduce;
  optim::start start = optim::start::after_forward;
  optim::miscount on_miscount = miscount::warn;
  std::int64_t bucket_bytes = 25 << 20;  ///< parameters travel in messages of about this size
};

/// Options of `adapt_then_combine`.
struct adapt_then_combine_options {
  /// J: adapt with the sum of J backwards, then communicate.
  int backward_passes_per_step = 1;
  optim::communication_type communication = communication_type::neighbor_allreduce;
  optim::miscount on_miscount = miscount::warn;
  std::int64_t bucket_bytes = 25 << 20;
};

/// How gradients look on the wire. They are summed in float32 all the same.
enum class compression : std::uint8_t { none, fp16, bf16 };

/// What a `step()` does in the middle of a window, after fewer backwards than J.
enum class partial_window : std::uint8_t {
  local,  ///< step with this rank's gradients; the window then ends by averaging parameters
  flush,  ///< reduce now, and divide by the real count
  error   ///< throw a `usage_error` with both counts
};

/// Options of `gradient_allreduce`.
struct gradient_allreduce_options {
  /// J: reduce the sum of J backwards.
  int backward_passes_per_step = 1;
  optim::compression compression = optim::compression::none;
  reduce_op op = reduce_op::average;  ///< average or sum over ranks
  double predivide = 1;               ///< divide by this before the reduction, multiply after it
  /// Divide the reduced gradient by the number of backwards, as if their batches had been one.
  bool average_aggregated_gradients = true;
  std::int64_t bucket_bytes = 25 << 20;  ///< gradients travel in messages of about this size
  bool sparse_as_dense = false;          ///< else a sparse gradient is an error
  optim::partial_window partial_window = optim::partial_window::local;
  optim::miscount on_miscount = miscount::warn;
};

namespace detail {

inline void expects_bucket(std::string_view optimizer, std::int64_t bytes) {
  expects(bytes >= 1, optimizer, ": bucket_bytes must be at least 1, got ", bytes);
}

}  // namespace detail
}  // namespace bluefog::optim
