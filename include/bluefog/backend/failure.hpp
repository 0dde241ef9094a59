// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <typeinfo>

#include <bluefog/backend/label.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

namespace detail {

template <class Error>
[[nodiscard]] bool is_exactly(const error& problem) noexcept {
  return typeid(problem) == typeid(Error);
}

}  // namespace detail

/// \return the same failure, told as that of the operation `label` unless it tells so already.
///
/// A transport knows ranks and bytes but not for what: `rank 1 sent 20 bytes ...` becomes
/// `allreduce "loss" (operation 7): rank 1 sent 20 bytes ...`. Type and code stay.
[[nodiscard]] inline std::exception_ptr explained(const std::exception_ptr& failure,
                                                  const operation_label& label) {
  if (!failure) return failure;
  try {
    std::rethrow_exception(failure);
  } catch (const error& problem) {
    const std::string_view said = problem.what();
    if (said.starts_with(label.operation)) return failure;
    const std::string text = concat(to_string(label), ": ", said);
    if (detail::is_exactly<mismatch_error>(problem))
      return std::make_exception_ptr(mismatch_error(text));
    if (detail::is_exactly<peer_error>(problem)) return std::make_exception_ptr(peer_error(text));
    if (detail::is_exactly<transport_error>(problem))
      return std::make_exception_ptr(
          transport_error(text, static_cast<const transport_error&>(problem).code()));
    return failure;
  } catch (...) {
    return failure;
  }
}

}  // namespace bluefog
