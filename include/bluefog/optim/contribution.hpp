// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

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

}  // namespace bluefog::optim::detail
