// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <bluefog/core/error.hpp>

namespace bluefog_test::gpu {

/// What one check found: empty if nothing is wrong.
struct finding {
  std::string check;
  std::string problem;
};

/// What the checks of one rank found, in the same order on every rank.
class findings {
 public:
  findings() = default;
  /// \param tell  called with each finding as soon as it is there.
  explicit findings(std::function<void(const finding&)> tell) : tell_(std::move(tell)) {}

  [[nodiscard]] auto begin() const { return all_.begin(); }
  [[nodiscard]] auto end() const { return all_.end(); }
  [[nodiscard]] std::size_t size() const { return all_.size(); }

  /// Adds what `check()` returns or throws; nothing after a failure of the transport or of a peer,
  /// which lasts, or a time-out, which the next check would meet as well.
  /// Says on stderr which check begins, if BLUEFOG_TEST_PROGRESS asks for that: the last line tells
  /// where a program has ended.
  template <class Check>
  void add(const std::string& name, const Check& check) {
    if (over_) return;
    static const bool asked = std::getenv("BLUEFOG_TEST_PROGRESS") != nullptr;
    if (asked) std::fprintf(stderr, "-- %s\n", name.c_str());
    finding result{name, ""};
    try {
      result.problem = check();
    } catch (const std::exception& problem) {
      result.problem = problem.what();
      over_ = dynamic_cast<const bluefog::transport_error*>(&problem) != nullptr ||
              dynamic_cast<const bluefog::peer_error*>(&problem) != nullptr ||
              dynamic_cast<const bluefog::timeout_error*>(&problem) != nullptr;
    }
    if (tell_) tell_(result);
    all_.push_back(std::move(result));
  }

 private:
  std::vector<finding> all_;
  std::function<void(const finding&)> tell_;
  bool over_ = false;
};

}  // namespace bluefog_test::gpu
