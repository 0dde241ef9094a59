// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace bluefog {

/// Base of everything that this library throws.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller broke a rule. Nothing has been sent, nothing has changed.
class usage_error : public error {
 public:
  using error::error;
};

/// Ranks disagree about an operation: its kind, shape, order, or who sends to whom.
class mismatch_error : public error {
 public:
  using error::error;
};

/// An operation did not complete within its time. The message names the ranks that are missing.
class timeout_error : public error {
 public:
  using error::error;
};

/// A rank that takes part has ended, or cannot do its part.
class peer_error : public error {
 public:
  using error::error;
};

/// A native communication library reported a failure.
class transport_error : public error {
 public:
  /// \param code  the native return code, unchanged.
  transport_error(const std::string& message, int code) : error(message), code_(code) {}

  /// \return the native return code, for `MPI_Error_class` or a switch on `ncclResult_t`.
  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

/// Can be written to a stream, and so be part of a message.
template <class T>
concept printable = requires(std::ostringstream& out, const T& value) { out << value; };

/// Joins its arguments as text: `concat("rank ", 3, " of ", 8)`.
template <printable... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return std::move(text).str();
}

/// Throws `Error` with the joined `parts` unless `condition` holds. They are joined only then, but
/// evaluated always.
///
/// The message starts, in lower case, with the public function's name, then the rule, then the
/// values: `expects(root < n, "broadcast: root must be below ", n, ", got ", root)`.
template <std::derived_from<error> Error = usage_error, printable... Parts>
constexpr void expects(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]]
    throw Error(concat(parts...));
}

}  // namespace bluefog
