// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/core/error.hpp>

namespace bluefog {

/// The names in use on one communicator. Any thread may ask.
class used_names {
 public:
  /// \return whether the name was free.
  [[nodiscard]] bool take(std::string_view name) {
    const std::scoped_lock lock(mutex_);
    if (std::ranges::find(names_, name) != names_.end()) return false;
    names_.emplace_back(name);
    return true;
  }
  void give_back(std::string_view name) noexcept {
    const std::scoped_lock lock(mutex_);
    names_.erase(std::ranges::find(names_, name));
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> names_;
};

/// Keeps the name of an operation in use, until somebody has waited for it.
///
/// Not until it is over: that happens on every rank at another time, and all ranks have to agree on
/// whether a name is free.
class name_lease {
 public:
  name_lease() noexcept = default;
  /// \param name  empty for none.
  /// \throws usage_error if the name is in use.
  name_lease(const std::shared_ptr<used_names>& home, std::string_view operation,
             std::string_view name)
      : name_(name) {
    if (name.empty()) return;
    expects(home->take(name), operation, ": the name \"", name,
            "\" is in use by an operation that nobody has waited for");
    home_ = home;
  }
  name_lease(name_lease&&) noexcept = default;
  name_lease& operator=(name_lease&& other) noexcept {
    std::swap(home_, other.home_);
    std::swap(name_, other.name_);
    return *this;
  }
  name_lease(const name_lease&) = delete;
  name_lease& operator=(const name_lease&) = delete;
  ~name_lease() { end(); }

  /// The name is free from now on.
  void end() noexcept {
    if (const auto home = std::exchange(home_, nullptr)) home->give_back(name_);
  }

 private:
  std::shared_ptr<used_names> home_;  // the communicator may go first
  std::string name_;
};

}  // namespace bluefog
