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

/// When `adapt_with_combine` begins to send the parameters. Where nothing but the wrapper changes
/// them, all four give the same parameters, and differ in what the transfer hides under. From the
/// beginning until `step()` an average is on its way that knows nothing of other changes: changing
/// a parameter in place is a `usage_error` of the step, as far as torch notices, and reloading one
/// (`torch::load`, `set_data`) takes the place of its average.
enum class start : std::uint8_t {
  /// At the end of `step()`, for the next one: under everything until then. If several passes make
  /// a communication, at the beginning of the last `forward()` of them, so that local steps cost
  /// nothing.
  after_step,
  /// When the last pass of a window is counted: under the backward. Parameters may be changed
  /// between `step()` and the next forward. Where backwards are counted, since `forward()` is not
  /// called, another model's loss that runs through the parameters (a generator's through its
  /// discriminator) begins it too: then they must not be changed before the next `step()`, as by
  /// clamping a critic. Call `forward()` for this model's own passes, or take `at_step`.
  after_forward,
  /// In `step()`: under nothing. Parameters may be changed at any time.
  at_step,
  /// As `after_step`, and the step itself is taken in the window's last backward, for each bucket
  /// when its gradients are complete, after which the bucket is sent anew; `step()` does the rest.
  /// Only for torch's SGD, Adam, AdamW, RMSprop and Adagrad, and only if every forward is followed
  /// by its own backward and nothing looks at or changes gradients in between: no clipping, no
  /// gradient scaler, no `retain_graph`, no other model's loss through these parameters, and no
  /// `nn::distributed_data_parallel` around the model, which is refused. If a communication fails,
  /// `backward()` or `step()` throws; parameters that came before it have been combined and
  /// adapted, the others neither. Nothing is on its way then, but ranks may be at different steps:
  /// go on from a checkpoint, with the wrapper made anew.
  inside_backward
};

/// What communications do with the model's floating buffers, e.g. the running mean and variance of
/// batch norm. Other buffers (its count of batches) never travel.
enum class buffer_policy : std::uint8_t {
  local,   ///< every rank keeps its own
  average  ///< they are averaged as the parameters are; by `gradient_allreduce` over all ranks
};

/// Options of `adapt_with_combine`.
struct adapt_with_combine_options {
  /// J: communicate after every J-th forward of the model; where `forward()` is not called, after
  /// every J-th backward, of which `adapt_then_combine_options` says more.
  int num_steps_per_communication = 1;
  optim::communication_type communication = communication_type::neighbor_allreduce;
  optim::start start = optim::start::after_forward;
  optim::miscount on_miscount = miscount::warn;
  /// Parameters travel in messages of about this size, or, on a graph where somebody has several
  /// sources, of at most 1 MiB (float32 and float64, except on `nccl_backend`).
  std::int64_t bucket_bytes = 25 << 20;
  /// K: every K-th communication is an average over all ranks; 0: none is.
  int global_average_every = 0;
  optim::buffer_policy buffers = buffer_policy::local;
};

/// Options of `adapt_then_combine`.
struct adapt_then_combine_options {
  /// J: adapt with the sum of J backwards, then communicate. One that reaches no parameter is not
  /// counted: with J > 1 each has to reach some on every rank. A backward within a backward, as in
  /// activation checkpointing, counts for itself, and so does what follows it: J has to be the
  /// number of all these, which `passes_since_communication()` tells before the step.
  int backward_passes_per_step = 1;
  optim::communication_type communication = communication_type::neighbor_allreduce;
  optim::miscount on_miscount = miscount::warn;
  std::int64_t bucket_bytes = 25 << 20;
  int global_average_every = 0;
  optim::buffer_policy buffers = buffer_policy::local;
};

/// How gradients look on the wire. They are summed in float32 all the same.
enum class compression : std::uint8_t { none, fp16, bf16 };

/// What a `step()` does in the middle of a window, after fewer backwards than J.
enum class partial_window : std::uint8_t {
  local,  ///< step with this rank's gradients; the window then ends by averaging parameters
  flush,  ///< reduce now, and divide by the real count
  error   ///< throw a `usage_error` with both counts
};

/// What the other ranks do once a rank has called `join()` because it ran out of batches.
enum class uneven : std::uint8_t {
  zeros,  ///< go on; the rank's gradient is zero from then on
  stop    ///< give up the step that they are at: all ranks stop after the same step
};

/// Options of `gradient_allreduce`.
struct gradient_allreduce_options {
  /// J: reduce the sum of J backwards. Where a backward has others within it, see
  /// `adapt_then_combine_options`, `average_aggregated_gradients` has to be false.
  int backward_passes_per_step = 1;
  optim::compression compression = optim::compression::none;
  reduce_op op = reduce_op::average;  ///< average or sum over ranks
  double predivide = 1;               ///< divide by this before the reduction, multiply after it
  /// Divide the reduced gradient by the number of backwards, as if their batches had been one.
  bool average_aggregated_gradients = true;
  std::int64_t bucket_bytes = 25 << 20;  ///< gradients travel in messages of about this size
  bool sparse_as_dense = false;          ///< else a sparse gradient is an error
  /// A pass that reaches no parameter is not counted. With J > 1 and `local` a rank with such a
  /// pass would step alone where others communicate, so each has to reach some parameter on every
  /// rank.
  optim::partial_window partial_window = optim::partial_window::local;
  optim::uneven uneven = optim::uneven::zeros;
  optim::miscount on_miscount = miscount::warn;
  /// Whenever gradients are reduced, or parameters averaged in their place. A rank that has joined
  /// has no say any more.
  optim::buffer_policy buffers = buffer_policy::local;
  /// Scale this rank's own gradients before they are reduced so that their norm is at most this, as
  /// `clip_grad_norm_` does; 0: off. So are those of a local step. They then travel in `step()`,
  /// not beside the backward. (A norm of the reduced ones is bounded between `synchronize()` and
  /// `step()`.)
  double local_max_norm = 0;
};

namespace detail {

inline void expects_bucket(std::string_view optimizer, std::int64_t bytes) {
  expects(bytes >= 1, optimizer, ": bucket_bytes must be at least 1, got ", bytes);
}

}  // namespace detail
}  // namespace bluefog::optim
