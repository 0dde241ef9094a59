// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fstream>
#include <stdexcept>
#include <string>

#include <nlohmann/json.hpp>

namespace example {

/// A file with one JSON object per line; nothing where no file is named.
///
///     json_report report(options.json);
///     report.write({{"epoch", 3}, {"accuracy", 0.96}});
class json_report {
 public:
  /// \throws std::runtime_error if `file` cannot be written. An empty name means no report.
  explicit json_report(const std::string& file) {
    if (file.empty()) return;
    out_.open(file);
    if (!out_) throw std::runtime_error(file + ": cannot be written");
  }

  /// Adds a line, which is in the file when this returns.
  void write(const nlohmann::ordered_json& line) {
    if (out_.is_open()) out_ << line.dump() << std::endl;
  }

 private:
  std::ofstream out_;
};

}  // namespace example
