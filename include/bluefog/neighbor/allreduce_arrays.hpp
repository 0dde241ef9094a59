// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <ranges>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/links.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog {

/// A range of arrays, each in one piece of memory that outlives the step from one to the next: a
/// vector of vectors, an array of spans, no view that makes vectors.
template <class Range>
concept contiguous_arrays =
    std::ranges::forward_range<const Range> &&
    contiguous_elements<std::remove_cvref_t<std::ranges::range_reference_t<const Range>>> &&
    std::ranges::borrowed_range<std::ranges::range_reference_t<const Range>>;

/// A range of arrays that may be written.
template <class Range>
concept writable_arrays =
    std::ranges::forward_range<Range> && writable_elements<std::ranges::range_reference_t<Range>> &&
    std::ranges::borrowed_range<std::ranges::range_reference_t<Range>>;

/// Arrays that outlive the call that is given them: an lvalue, or a view.
template <class Range>
concept lasting_arrays = contiguous_arrays<Range> && std::ranges::borrowed_range<Range>;

/// Arrays that outlive the call that is given them and may be written.
template <class Range>
concept lasting_writable_arrays = writable_arrays<Range> && std::ranges::borrowed_range<Range>;

namespace detail {

/// Arrays that are to travel together.
struct array_list {
  std::vector<const_buffer> in;
  std::vector<mutable_buffer> out;
  packed_layout layout;

  template <contiguous_arrays In, writable_arrays Out>
  array_list(const In& sources, Out&& targets) {
    for (const auto& each : sources) in.push_back(as_buffer(each));
    for (auto&& each : targets) out.push_back(as_mutable_buffer(each));
    for (const const_buffer& each : in) layout.add(each.count, each.type);
  }
};

template <backend Backend>
[[nodiscard]] call_description check_arrays(const communicator<Backend>& comm,
                                            const array_list& arrays, const neighborhood& links,
                                            const call_options& options) {
  constexpr std::string_view operation = "neighbor_allreduce";
  expects(arrays.in.size() == arrays.out.size(), operation, ": input has ", arrays.in.size(),
          " arrays, output has ", arrays.out.size());
  std::string shapes;
  for (std::size_t i = 0; i < arrays.in.size(); ++i) {
    const auto where = concat(operation, ": array ", i);
    expects_fitting(where, comm, arrays.in[i], arrays.out[i]);
    expects(is_floating(arrays.in[i].type), where, ": weights need a floating type, got ",
            arrays.in[i].type);
    if (comm.checks()) shapes += concat(" ", arrays.in[i].type, " [", arrays.in[i].count, "]");
  }
  validate(operation, links, comm.rank(), comm.size());
  auto call = describe(comm, operation, options, " of ", arrays.in.size(), " arrays", shapes);
  call.links = links;
  return call;
}

/// \return memory that is where all arrays are.
[[nodiscard]] inline const std::byte* first_data(const array_list& arrays) {
  for (const const_buffer& each : arrays.in)
    if (each.count > 0) return each.data;
  return nullptr;
}

/// Mixes arrays that lie apart, by way of one piece of memory: one message per peer.
template <backend Backend>
task mix_arrays_task(operation_context<Backend> context, array_list arrays, neighborhood links) {
  const auto packed = context.scratch(arrays.layout.bytes, first_data(arrays));
  const auto& segments = arrays.layout.segments;
  const auto compute = context.compute();
  for (std::size_t i = 0; i < segments.size(); ++i)
    compute.copy(arrays.in[i],
                 {packed.data() + segments[i].offset, segments[i].count, segments[i].type});
  auto mixing = mix_task(context, packed.data(), packed.data(), arrays.layout, std::move(links));
  co_await std::move(mixing);
  for (std::size_t i = 0; i < segments.size(); ++i)
    compute.copy({packed.data() + segments[i].offset, segments[i].count, segments[i].type},
                 arrays.out[i]);
}

}  // namespace detail

/// Averages many arrays with those of neighbours, in one message per neighbour however many.
///
///     std::vector<std::vector<float>> layers = ...;
///     neighbor_allreduce(comm, layers, layers, topology::exponential(comm.size()));
///
/// \param in   a range of arrays; as many of the same types and lengths on every
///             rank.
/// \param out  as many arrays of the same lengths; may be `in`.
/// The rest is as in `neighbor_allreduce` of one array.
template <backend Backend, contiguous_arrays In, writable_arrays Out,
          neighbor_links Links = neighborhood>
void neighbor_allreduce(communicator<Backend>& comm, const In& in, Out&& out, const Links& links,
                        const call_options& options = {}) {
  const detail::array_list arrays(in, out);
  const neighborhood own = detail::links_of("neighbor_allreduce", comm, links);
  comm.run(detail::of_graph(comm, links, detail::check_arrays(comm, arrays, own, options)),
           [&](auto context) { return detail::mix_arrays_task(context, arrays, own); });
}

/// Starts to average many arrays. The arrays must outlive the request.
template <backend Backend, lasting_arrays In, lasting_writable_arrays Out,
          neighbor_links Links = neighborhood>
request<void> neighbor_allreduce_nonblocking(communicator<Backend>& comm, In&& in, Out&& out,
                                             const Links& links, const call_options& options = {}) {
  const detail::array_list arrays(in, out);
  const neighborhood own = detail::links_of("neighbor_allreduce", comm, links);
  return {
      comm.driver(),
      comm.start(detail::of_graph(comm, links, detail::check_arrays(comm, arrays, own, options)),
                 [&](auto context) { return detail::mix_arrays_task(context, arrays, own); })};
}

}  // namespace bluefog
