// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <list>
#include <mutex>
#include <utility>

namespace bluefog::detail {

/// Keeps a value until the process ends, because a transport may still use its memory. What has
/// been kept stays reachable, and is never destroyed.
template <std::movable Value>
void keep_for_ever(Value value) noexcept {
  static std::mutex mutex;
  static auto* const kept = new std::list<Value>;
  const std::scoped_lock lock(mutex);
  kept->push_back(std::move(value));
}

}  // namespace bluefog::detail
