// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/collective/reduction.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/reduce_op.hpp>

namespace bluefog {

/// Which ranks take part in a reduction: all, or those of each machine among themselves.
enum class scope : std::uint8_t { all, machine };

/// Options of one allreduce.
struct allreduce_options {
  std::string_view name = {};         ///< see `call_options`
  bluefog::scope scope = scope::all;  ///< the same on every rank
};

namespace detail {

template <backend Backend>
[[nodiscard]] call_description check_allreduce(const communicator<Backend>& comm, const_buffer in,
                                               const_buffer out, reduce_op op,
                                               const allreduce_options& options) {
  expects_fitting("allreduce", comm, in, out);
  expects(op != reduce_op::average || is_floating(in.type),
          "allreduce: average needs a floating type, got ", in.type, "; use sum");
  return describe(comm, "allreduce", {options.name}, " ", in.type, " [", in.count, "] ", op,
                  options.scope == scope::machine ? " within machines" : "");
}

template <backend Backend>
[[nodiscard]] task allreduce_task(operation_context<Backend> context, const_buffer in,
                                  mutable_buffer out, reduce_op op, scope participants,
                                  std::shared_ptr<const void> owner = nullptr) {
  if (participants == scope::machine)
    return reduce_among(context, in, out, op,
                        context.layout().members(context.layout().machine_rank()),
                        std::move(owner));
  return reduce_over_all(context, in, out, op, std::move(owner));
}

}  // namespace detail

/// Combines the values of all ranks, elementwise; every rank gets the result.
///
/// \f[ y_k = \mathrm{op}_{r=0}^{n-1} x_{r,k} \f]
/// Collective: every rank must call it, in the same order as its other operations. Bit-equal on all
/// ranks. 16-bit floats are summed in float32 and rounded once; integers wrap around.
///
/// \param in       x: equally many elements of one type on every rank.
/// \param out      y: as many elements; may be `in`, then on every rank.
/// \param op       average needs a floating type.
/// \param options  e.g. `{.scope = scope::machine}` to combine within each machine only.
/// \throws usage_error if types or lengths differ or integers are to be averaged; nothing was sent.
/// \throws timeout_error, transport_error, mismatch_error, peer_error; `out` is then unspecified.
/// \note Sends 2(n-1)/n times the input where the algorithm is bandwidth-optimal.
template <backend Backend, contiguous_elements In, writable_elements Out>
void allreduce(communicator<Backend>& comm, const In& in, Out&& out,
               reduce_op op = reduce_op::average, const allreduce_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  comm.run(detail::check_allreduce(comm, source, target, op, options), [&](auto context) {
    return detail::allreduce_task(context, source, target, op, options.scope);
  });
}

/// Starts an `allreduce`. `in` and `out` must outlive the request.
template <backend Backend, lasting_elements In, lasting_writable_elements Out>
request<void> allreduce_nonblocking(communicator<Backend>& comm, In&& in, Out&& out,
                                    reduce_op op = reduce_op::average,
                                    const allreduce_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  return {comm.driver(),
          comm.start(detail::check_allreduce(comm, source, target, op, options), [&](auto context) {
            return detail::allreduce_task(context, source, target, op, options.scope);
          })};
}

}  // namespace bluefog
