// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace bluefog::optim::detail {

/// What one rank brings to a reduction, and who has joined after it.
struct contribution {
  std::int64_t passes = 1;      ///< how many backwards its gradients are the sum of; 0: none
  std::int64_t wanted = 1;      ///< how many they usually are
  bool joined = false;          ///< this rank has no more data
  std::int64_t objection = -1;  ///< a parameter that was used, or not used, against a promise
  bool local_steps = false;     ///< it has stepped without the other ranks since the last reduction
  bool states_differ = false;   ///< its momenta may not be those of the other ranks
};

/// What all ranks know after a reduction.
struct reduction_result {
  int joined = 0;               ///< how many ranks had no more data
  int last = -1;                ///< the highest of those that had data for longest
  int objector = -1;            ///< a rank with an objection, if any
  std::int64_t objection = -1;  ///< that rank's
  double passes = 0;            ///< the mean of the ranks that had any, 0 if none had
  bool local_steps = false;     ///< some rank has; gradients are then as they were
  bool states_differ = false;   ///< some rank's may
};

/// What a rank says about itself once somebody has given notice.
struct reduction_record {
  static constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();

  std::int64_t spoilt;     // 1: what it has sent are no longer its gradients
  std::int64_t changed;    // 1: its parameters are not those of the plan
  std::int64_t passes;     // backwards in its gradients
  std::int64_t joined_in;  // the round in which it had no more data, `never` if it has some
  std::int64_t objection;
  std::int64_t local_steps;
  std::int64_t states_differ;
};

/// \return how many passes those ranks that have any have on average, 0 if none has.
[[nodiscard]] inline double mean_passes(const std::vector<reduction_record>& all) {
  std::int64_t sum = 0;
  std::int64_t active = 0;
  for (const reduction_record& each : all) {
    sum += each.passes;
    active += each.passes > 0 ? 1 : 0;
  }
  return active == 0 ? 0 : static_cast<double>(sum) / static_cast<double>(active);
}

/// \return what follows from what all ranks have said.
[[nodiscard]] inline reduction_result summary(const std::vector<reduction_record>& all) {
  reduction_result result{.passes = mean_passes(all)};
  std::int64_t latest = 0;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].joined_in != reduction_record::never) ++result.joined;
    if (all[rank].local_steps != 0) result.local_steps = true;
    if (all[rank].states_differ != 0) result.states_differ = true;
    if (all[rank].objection >= 0 && result.objector < 0) {
      result.objector = static_cast<int>(rank);
      result.objection = all[rank].objection;
    }
    if (all[rank].joined_in < latest) continue;
    latest = all[rank].joined_in;
    result.last = static_cast<int>(rank);
  }
  return result;
}

}  // namespace bluefog::optim::detail
