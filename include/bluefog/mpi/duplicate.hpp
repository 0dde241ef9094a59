// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include <mpi.h>

#include <bluefog/backend/backoff.hpp>
#include <bluefog/backend/label.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/keep_for_ever.hpp>
#include <bluefog/core/logger.hpp>
#include <bluefog/core/settings.hpp>
#include <bluefog/mpi/check.hpp>
#include <bluefog/mpi/handle.hpp>
#include <bluefog/mpi/library.hpp>
#include <bluefog/mpi/request_errors.hpp>
#include <bluefog/mpi/threads.hpp>

namespace bluefog::mpi {

/// Duplicates a communicator.
///
/// Collective over `group`, and where its ranks meet first: it warns of ranks that do not come, and
/// gives up, as operations do, with the times of the environment. Other threads may call MPI
/// meanwhile.
///
/// \throws timeout_error if some rank does not come in time.
[[nodiscard]] inline unique_communicator duplicate(MPI_Comm group) {
  using clock = std::chrono::steady_clock;
  struct meeting {
    MPI_Comm copy = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  auto under_way = std::make_unique<meeting>();  // MPI writes there when the ranks have met
  {
    const auto lock = threads::serialize();
    check(MPI_Comm_idup(group, &under_way->copy, &under_way->request), "MPI_Comm_idup");
  }
  const auto limits = settings::from_environment();
  const auto began = clock::now();
  bool told = false;
  for (bluefog::detail::backoff pause(bluefog::detail::waiting::foreground);; pause.pause()) {
    int met = 0;
    {
      const auto lock = threads::serialize();
      const request_errors::scope returned;
      check(MPI_Test(&under_way->request, &met, MPI_STATUS_IGNORE), "MPI_Test");
    }
    if (met != 0) return unique_communicator(under_way->copy);
    if (!pause.slow()) continue;
    const auto waited = clock::now() - began;
    if (waited >= limits.timeout) {
      library::mark_given_up();
      bluefog::detail::keep_for_ever(std::move(under_way));
      throw timeout_error(concat("mpi_backend: timed out after ",
                                 bluefog::detail::seconds_text(waited), ", waiting for ranks that ",
                                 "do not make this communicator"));
    }
    if (!told && waited >= limits.stall_warning) {
      told = true;
      logger::write(log_level::warning,
                    concat("stall: mpi_backend has waited ", bluefog::detail::seconds_text(waited),
                           " for all ranks to make a communicator"));
    }
  }
}

}  // namespace bluefog::mpi
