// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <ostream>
#include <span>
#include <vector>

namespace bluefog {

/// Which ranks share a machine. Machines are numbered by their lowest rank; within a machine, ranks
/// are numbered in rank order.
class machine_layout {
 public:
  machine_layout() = default;

  /// \param machine_keys  one number per rank; equal numbers mean one machine.
  machine_layout(std::span<const int> machine_keys, int rank) {
    members_.clear();
    std::vector<int> keys;
    for (int other = 0; other < static_cast<int>(machine_keys.size()); ++other) {
      const int key = machine_keys[static_cast<std::size_t>(other)];
      const auto known = std::ranges::find(keys, key);
      const auto machine = static_cast<std::size_t>(known - keys.begin());
      if (known == keys.end()) {
        keys.push_back(key);
        members_.emplace_back();
      }
      if (other == rank) {
        machine_ = static_cast<int>(machine);
        local_rank_ = static_cast<int>(members_[machine].size());
      }
      members_[machine].push_back(other);
    }
  }

  [[nodiscard]] int machine_rank() const noexcept { return machine_; }
  [[nodiscard]] int machine_size() const noexcept { return static_cast<int>(members_.size()); }
  [[nodiscard]] int local_rank() const noexcept { return local_rank_; }
  [[nodiscard]] int local_size() const { return static_cast<int>(members(machine_).size()); }

  /// \return the ranks of `machine`, ascending.
  [[nodiscard]] const std::vector<int>& members(int machine) const {
    return members_.at(static_cast<std::size_t>(machine));
  }

  /// \return whether all machines have the same number of ranks, in consecutive order.
  [[nodiscard]] bool is_homogeneous() const noexcept {
    const std::size_t size = members_.front().size();
    int next = 0;
    for (const auto& machine : members_) {
      if (machine.size() != size) return false;
      for (const int member : machine)
        if (member != next++) return false;
    }
    return true;
  }

  /// Writes sizes and members, e.g. "machine 0 has ranks 0, 1, 2; machine 1 has rank 3".
  friend std::ostream& operator<<(std::ostream& out, const machine_layout& layout) {
    for (int machine = 0; machine < layout.machine_size(); ++machine) {
      const auto& members = layout.members(machine);
      out << (machine == 0 ? "" : "; ") << "machine " << machine << " has "
          << (members.size() == 1 ? "rank" : "ranks");
      for (const int member : members) out << (member == members.front() ? " " : ", ") << member;
    }
    return out;
  }

 private:
  int machine_ = 0;
  int local_rank_ = 0;
  std::vector<std::vector<int>> members_ = {{0}};
};

}  // namespace bluefog
