// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <ranges>
#include <type_traits>
#include <utility>

namespace bluefog::topology {

/// An immutable value on the heap that its copies share; copying costs one counter.
///
/// What `std::shared_ptr<const T>` is, but usable in constant expressions. Never null, except that
/// a default-constructed or moved-from one may only be assigned to or destroyed. Copies in several
/// threads are as safe as those of a `shared_ptr`.
template <class T>
class shared {
 public:
  constexpr shared() noexcept = default;
  constexpr explicit shared(T value) : block_(new block{std::move(value)}) {}

  // Counts its owners by hand, so it defines all five.
  constexpr shared(const shared& other) noexcept : block_(other.block_) {
    if (block_ != nullptr) count(+1);
  }
  constexpr shared(shared&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  constexpr shared& operator=(const shared& other) noexcept {
    shared(other).swap(*this);
    return *this;
  }
  constexpr shared& operator=(shared&& other) noexcept {
    shared(std::move(other)).swap(*this);
    return *this;
  }
  constexpr ~shared() {
    if (block_ != nullptr && count(-1) == 0) delete block_;
  }

  [[nodiscard]] constexpr const T& operator*() const noexcept { return block_->value; }
  [[nodiscard]] constexpr const T* operator->() const noexcept { return &block_->value; }

  constexpr void swap(shared& other) noexcept { std::swap(block_, other.block_); }

  /// Whether both hold equal values, which is immediate for copies.
  [[nodiscard]] friend constexpr bool operator==(const shared& a, const shared& b) {
    return a.block_ == b.block_ || (a.block_ != nullptr && b.block_ != nullptr && *a == *b);
  }

 private:
  struct block {
    T value;
    std::ptrdiff_t owners = 1;
  };

  /// \return the number of owners after adding `change`.
  constexpr std::ptrdiff_t count(std::ptrdiff_t change) const noexcept {
    if (std::is_constant_evaluated()) return block_->owners += change;
    return std::atomic_ref(block_->owners).fetch_add(change, std::memory_order_acq_rel) + change;
  }

  block* block_ = nullptr;
};

/// A view of ranks that lie in memory, which it keeps alive.
template <class Owner>
class kept_ranks : public std::ranges::view_interface<kept_ranks<Owner>> {
 public:
  constexpr kept_ranks() = default;

  /// \param owner  what [first, last) is part of.
  constexpr kept_ranks(Owner owner, const int* first, const int* last)
      : owner_(std::move(owner)), first_(first), last_(last) {}

  [[nodiscard]] constexpr const int* begin() const noexcept { return first_; }
  [[nodiscard]] constexpr const int* end() const noexcept { return last_; }

 private:
  Owner owner_{};
  const int* first_ = nullptr;
  const int* last_ = nullptr;
};

}  // namespace bluefog::topology
