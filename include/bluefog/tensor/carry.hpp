// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/tensor/device.hpp>
#include <bluefog/tensor/parcel.hpp>

namespace bluefog::detail {

/// \return one parcel per element type, in the order of their first tensors.
template <backend Backend>
[[nodiscard]] std::vector<parcel> parcels_by_type(const operation_context<Backend>& context,
                                                  std::span<const at::Tensor> in,
                                                  std::span<const at::Tensor> targets) {
  std::vector<c10::ScalarType> types;
  for (const at::Tensor& x : in)
    if (std::ranges::find(types, x.scalar_type()) == types.end()) types.push_back(x.scalar_type());
  std::vector<parcel> parcels;
  for (const c10::ScalarType type : types) {
    std::vector<at::Tensor> from;
    std::vector<at::Tensor> to;
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in[i].scalar_type() != type) continue;
      from.push_back(in[i]);
      to.push_back(targets[i]);
    }
    parcels.emplace_back(context, from, to);
  }
  return parcels;
}

/// Runs tasks one after the other, once what they work with is in its parcels, which the caller
/// keeps.
template <backend Backend>
task run_loaded(operation_context<Backend> context, std::vector<task> works,
                std::span<parcel> parcels) {
  // Native collectives may come after a wait: the order of all ranks has to be held for them.
  const bool holds =
      context.collective() && (works.size() > 1 || std::ranges::any_of(parcels, &parcel::crosses));
  if (holds) co_await order::hold;
  for (parcel& each : parcels) {
    each.load(context);
    for (parcel::passage& way : each.passages()) co_await way.passed;
  }
  for (task& each : works) co_await std::move(each);
  if (holds) co_await order::release;
}

/// Copies results to where they belong.
template <backend Backend>
task unload(operation_context<Backend> context, std::span<parcel> parcels) {
  if constexpr (device_backend<Backend>) {
    // Memory that the host shares with the device: nothing may work on it any more.
    const auto shared = [&](const parcel& each) {
      return !each.device() && context.transport().on_device(each.output());
    };
    if (std::ranges::any_of(parcels, shared)) {
      auto rest = context.transport().finished();
      co_await rest;
    }
  }
  for (parcel& each : parcels) {
    each.deliver(context);
    for (parcel::passage& way : each.passages()) co_await way.passed;
  }
}

/// Runs tasks one after the other between loading and unloading what they work with.
template <backend Backend>
task carry(operation_context<Backend> context, std::vector<task> works,
           std::vector<parcel> parcels) {
  const auto owned = std::make_shared<std::vector<parcel>>(std::move(parcels));
  const lasting held{owned};
  co_await held;
  auto running = run_loaded(context, std::move(works), std::span(*owned));
  co_await std::move(running);
  if (std::ranges::none_of(*owned, &parcel::delivers)) co_return;
  auto unloading = unload(context, std::span(*owned));
  co_await std::move(unloading);
}

/// The same for one task and one parcel.
template <backend Backend>
[[nodiscard]] task carry(operation_context<Backend> context, task work, parcel values) {
  std::vector<task> works;
  works.push_back(std::move(work));
  std::vector<parcel> parcels;
  parcels.push_back(std::move(values));
  return carry(context, std::move(works), std::move(parcels));
}

/// Runs a task once what it works with is in the parcel, which is kept alive; delivers nothing.
template <backend Backend>
task run_with(operation_context<Backend> context, task work, std::shared_ptr<parcel> values) {
  const lasting held{values};
  co_await held;
  std::vector<task> works;
  works.push_back(std::move(work));
  auto running = run_loaded(context, std::move(works), std::span(values.get(), 1));
  co_await std::move(running);
}

/// Puts what the transport does on the parcel's device, if it has one, from now on behind what this
/// thread has given to its stream there.
template <backend Backend>
void transport_follows(communicator<Backend>& comm, const parcel& values) {
  if constexpr (device_backend<Backend>)
    if (values.device()) {
      name_caller_stream(comm, *values.device());
      comm.transport().follow(comm.transport().called());
    }
}

/// Has `compute(computation<Backend>)` write to a parcel that nothing else works on, and then the
/// result delivered: on a device among what this thread gives to its stream there. Waits for
/// nothing but memory that the host shares with a device.
template <backend Backend, class Compute>
void write_in_order(communicator<Backend>& comm, const parcel& values, Compute compute) {
  auto& transport = comm.transport();
  if constexpr (device_backend<Backend>) {
    if (values.device()) {
      name_caller_stream(comm, *values.device());
      compute(computation<Backend>(transport, /*for_caller=*/true));
      values.deliver_here();
      return transport_follows(comm, values);  // before temporary memory is used anew
    }
    if (transport.on_device(values.output())) {
      compute(computation<Backend>(transport));
      transport.synchronize();
      return values.deliver_here();
    }
  }
  compute(computation<Backend>(transport));
  values.deliver_here();
}

}  // namespace bluefog::detail
