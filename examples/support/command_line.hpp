// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include <CLI/CLI.hpp>

namespace example {

/// \return whether this process is the one that speaks for all those that a launcher has started.
inline bool speaks_for_all() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
    if (const char* rank = std::getenv(name)) return std::string_view(rank) == "0";
  return true;
}

/// Reads the command line into what the options of `app` are bound to.
///
/// \return nothing; or, if there is nothing more to do, after `--help` or a mistake, which has then
///         been reported once for all ranks, the code to exit with.
inline std::optional<int> parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream nowhere;
    return speaks_for_all() ? app.exit(error) : app.exit(error, nowhere, nowhere);
  }
  return std::nullopt;
}

/// Declares `--backend` and `--ranks`, with the present values as defaults.
inline void add_backend_options(CLI::App& app, std::string& backend, int& ranks) {
  app.add_option("--backend", backend, "what carries the messages")
      ->check(CLI::IsMember({"mpi", "threads"}));
  const auto* chosen = app.add_option("--ranks", ranks, "how many, with --backend threads")
                           ->check(CLI::PositiveNumber);
  app.final_callback([&backend, chosen] {
    if (backend == "mpi" && chosen->count() > 0)
      throw CLI::ValidationError("--ranks",
                                 "needs --backend threads; with mpi, mpirun -np says it");
  });
}

}  // namespace example
