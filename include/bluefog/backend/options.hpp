// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

#include <bluefog/core/error.hpp>
#include <bluefog/core/settings.hpp>

namespace bluefog {

/// How a communicator behaves. What is not named comes from the environment.
///
///     bluefog::communicator<bluefog::mpi_backend> comm({.check = true, .timeout = 20s});
struct communicator_options {
  /// Compare every operation over all ranks before it starts (`BLUEFOG_CHECK`). Costs two rounds of
  /// short messages per operation. The same on every rank.
  bool check = settings::from_environment().check;
  /// Longest time from the call of an operation, or from the end of the one before it if it had to
  /// wait for that, to its end (`BLUEFOG_TIMEOUT`). Making an `mpi_backend` takes the
  /// environment's.
  std::chrono::milliseconds timeout = settings::from_environment().timeout;
  /// Time after which the log names an operation that waits, and for whom
  /// (`BLUEFOG_STALL_WARNING`). One at or above `timeout` means none: the error says it all. What
  /// ranks do before either is over follows from the smaller.
  std::chrono::milliseconds stall_warning = settings::from_environment().stall_warning;
  /// So many consecutive ranks count as one machine (`BLUEFOG_NODES_PER_MACHINE`); by default the
  /// ranks that share memory do. The same on every rank.
  std::optional<int> ranks_per_machine = settings::from_environment().ranks_per_machine;

  /// Tensors of a device travel by way of host memory, also where the transport takes them as they
  /// are, and are mixed on the CPU (`BLUEFOG_OPS_ON_CPU`). Native reductions stay the transport's.
  bool ops_on_cpu = settings::from_environment().ops_on_cpu;

  /// \throws usage_error that names the option and its value.
  void validate() const {
    expects(timeout.count() > 0, "communicator: the timeout must be positive, got ",
            timeout.count(), " ms");
    expects(stall_warning.count() > 0, "communicator: the stall warning must be positive, got ",
            stall_warning.count(), " ms");
    expects(std::max(timeout, stall_warning) <= settings::longest_time,
            "communicator: times must be at most ", settings::longest_time.count(),
            " ms, far from the clock's own limit; got a timeout of ", timeout.count(),
            " ms and a stall warning of ", stall_warning.count(), " ms");
    expects(!ranks_per_machine || *ranks_per_machine >= 1,
            "communicator: ranks_per_machine must be at least 1, got ",
            ranks_per_machine.value_or(1));
  }
};

}  // namespace bluefog
