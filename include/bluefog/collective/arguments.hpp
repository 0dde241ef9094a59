// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ranges>
#include <string>
#include <string_view>
#include <utility>

#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

/// Elements that outlive the call that is given them: an lvalue, or a view such as std::span. A
/// non-blocking operation would read a temporary vector after it is gone.
template <class Range>
concept lasting_elements = contiguous_elements<Range> && std::ranges::borrowed_range<Range>;

/// Elements that outlive the call that is given them and may be written.
template <class Range>
concept lasting_writable_elements = writable_elements<Range> && std::ranges::borrowed_range<Range>;

}  // namespace bluefog

namespace bluefog::detail {

/// Checks that `out` has the element type of `in`.
inline void expects_same_type(std::string_view operation, const_buffer in, const_buffer out) {
  expects(in.type == out.type, operation, ": input is ", in.type, ", output is ", out.type);
}

/// Checks that `out` can hold what comes of `in`, in the same kind of memory: the host's or a
/// device's.
template <backend Backend>
void expects_fitting(std::string_view operation, const communicator<Backend>& comm, const_buffer in,
                     const_buffer out) {
  expects_same_type(operation, in, out);
  expects(in.count == out.count, operation, ": input has ", in.count, " elements, output has ",
          out.count);
  if constexpr (device_backend<Backend>) {
    const Backend& transport = comm.transport();
    const auto kind = [&](const_buffer values) {
      return transport.on_device(values.data) ? "a device's" : "the host's";
    };
    expects(in.data == out.data || in.count == 0 ||
                transport.on_device(in.data) == transport.on_device(out.data),
            operation, ": input lies in ", kind(in), " memory, output in ", kind(out));
  }
}

/// Checks that `rank` exists on `comm`.
template <backend Backend>
void expects_rank(std::string_view operation, const communicator<Backend>& comm, int rank,
                  std::string_view what) {
  expects(rank >= 0 && rank < comm.size(), operation, ": ", what, " must be in [0, ", comm.size(),
          "), got ", rank);
}

/// Describes a call for check mode; the text that has to agree is made only there.
template <backend Backend, class... Parts>
[[nodiscard]] call_description describe(const communicator<Backend>& comm,
                                        std::string_view operation, const call_options& options,
                                        const Parts&... agreement) {
  return {.operation = operation,
          .name = std::string(options.name),
          .agreement = comm.checks() ? concat(agreement...) : std::string()};
}

}  // namespace bluefog::detail
