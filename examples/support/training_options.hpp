// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>

#include "command_line.hpp"

namespace example {

/// What the user of a training example may choose.
struct training_options {
  std::string optimizer = "adapt_with_combine";
  std::string topology = "one_peer_exponential";
  std::string model = "cnn";
  std::string backend = "mpi";
  int ranks = 4;  // with threads; a launcher decides otherwise
  int epochs = 10;
  std::size_t batch_size = 16;  // of each rank
  double learning_rate = 0.015;
  std::uint64_t seed = 1;
  std::string data = ".data/mnist";
  std::string json;
};

/// Declares those options of `chosen` that every training has, with its present values as defaults.
inline void add_common_options(CLI::App& app, training_options& chosen) {
  app.option_defaults()->always_capture_default();
  app.add_option("--model", chosen.model, "the network")->check(CLI::IsMember({"cnn", "mlp"}));
  add_backend_options(app, chosen.backend, chosen.ranks);
  app.add_option("--epochs", chosen.epochs, "passes over the data")->check(CLI::PositiveNumber);
  app.add_option("--batch-size", chosen.batch_size, "images per step and rank")
      ->check(CLI::PositiveNumber);
  app.add_option("--learning-rate", chosen.learning_rate, "of SGD with momentum 0.9")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--seed", chosen.seed, "of the initial parameters and of the order of images");
  app.add_option("--data", chosen.data, "folder with MNIST's files, unpacked");
}

/// Declares all options of `chosen`, with its present values as defaults.
inline void add_training_options(CLI::App& app, training_options& chosen) {
  app.option_defaults()->always_capture_default();
  app.add_option("--optimizer", chosen.optimizer, "how ranks communicate; local: not at all")
      ->check(CLI::IsMember(
          {"adapt_with_combine", "adapt_then_combine", "gradient_allreduce", "local"}));
  app.add_option("--topology", chosen.topology, "who averages with whom, with adapt_...")
      ->check(CLI::IsMember({"one_peer_exponential", "exponential", "symmetric_exponential", "ring",
                             "mesh_grid_2d", "star", "fully_connected"}));
  add_common_options(app, chosen);
  app.add_option("--json", chosen.json, "file that gets a line of JSON per epoch");
}

/// Reads the command line.
///
/// \param description  what `--help` says first.
/// \return the options; or the code to exit with, see `parse`.
inline std::pair<std::optional<training_options>, int> read_command_line(
    int argc, char** argv, const std::string& description) {
  training_options chosen;
  CLI::App app(description);
  add_training_options(app, chosen);
  if (const auto code = parse(app, argc, argv)) return {std::nullopt, *code};
  return {chosen, 0};
}

}  // namespace example
