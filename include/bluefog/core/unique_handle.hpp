// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <utility>

namespace bluefog {

/// How to recognise and release one kind of native handle.
template <class T>
concept handle_traits = requires(typename T::value_type handle) {
  { T::null() } noexcept -> std::same_as<typename T::value_type>;
  { T::close(handle) } noexcept;
};

/// Sole owner of a native handle; the only place in the library that releases one.
///
/// Invariant: holds either `Traits::null()` or a handle that nobody else will close. A moved-from
/// or default-constructed object holds null.
template <handle_traits Traits>
class unique_handle {
 public:
  using value_type = typename Traits::value_type;

  unique_handle() noexcept = default;
  /// Takes ownership of `handle`.
  explicit unique_handle(value_type handle) noexcept : handle_(handle) {}
  unique_handle(const unique_handle&) = delete;
  unique_handle(unique_handle&& other) noexcept : handle_(other.release()) {}
  unique_handle& operator=(const unique_handle&) = delete;
  unique_handle& operator=(unique_handle&& other) noexcept {
    unique_handle(std::move(other)).swap(*this);
    return *this;
  }
  ~unique_handle() {
    if (*this) Traits::close(handle_);
  }

  [[nodiscard]] value_type get() const noexcept { return handle_; }
  [[nodiscard]] explicit operator bool() const noexcept { return handle_ != Traits::null(); }
  /// Gives up ownership. \return the handle, which the caller now has to close.
  [[nodiscard]] value_type release() noexcept { return std::exchange(handle_, Traits::null()); }
  void swap(unique_handle& other) noexcept { std::swap(handle_, other.handle_); }

 private:
  value_type handle_ = Traits::null();
};

}  // namespace bluefog
