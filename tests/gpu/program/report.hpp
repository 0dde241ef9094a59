// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <bluefog/collective/barrier.hpp>

#include "gpu/finding.hpp"

/// What tests/gpu.sh reads: lines "pass NAME" and "fail NAME: rank R: why", of each rank on its own
/// and as soon as they are known, since a communicator or a program may end any time. The script
/// puts the ranks' lines together.
namespace bluefog_test::gpu {

/// \param where  follows each check's name; if there is none, what passes is said of each, too.
[[nodiscard]] inline findings printed_findings(int rank, const std::string& where = "") {
  return findings([=](const finding& found) {
    if (!found.problem.empty())
      std::printf("fail %s%s: rank %d: %s\n", found.check.c_str(), where.c_str(), rank,
                  found.problem.c_str());
    else if (where.empty())
      std::printf("pass %s\n", found.check.c_str());
  });
}

/// Says that all has passed, if so and if that has not been said of each. Waits for the other
/// ranks, which may need this one until they are done, too. \return how much was wrong on this
/// rank.
template <class Comm>
int conclude(Comm& comm, const findings& found, const std::string& where = "") {
  int failures = 0;
  for (const finding& each : found) failures += each.problem.empty() ? 0 : 1;
  if (failures == 0 && !where.empty())
    std::printf("pass %zu checks%s\n", found.size(), where.c_str());
  try {
    bluefog::barrier(comm);
  } catch (const std::exception&) {
    if (failures == 0) throw;  // else it is known what was first
  }
  return failures;
}

/// Calls `work()`, which returns how many milliseconds it took, for a third of a second: an idle
/// device's clocks are low.
template <class Work>
void let_clocks_rise(const Work& work) {
  for (double time = 0; time < 333;) time += work();
}

/// Says what has ended the program. \param words  its arguments: the check, and where there are
/// several ranks the file by which they meet, the rank and their number.
inline void say_end(const std::vector<std::string>& words, const std::exception& problem) {
  const std::string rank = words.size() >= 4 ? "rank " + words[2] + ": " : "";
  std::printf("fail %s: %s%s\n", words[0].c_str(), rank.c_str(), problem.what());
}

}  // namespace bluefog_test::gpu
