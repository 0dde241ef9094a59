// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <utility>

#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/task.hpp>

namespace bluefog {

/// Runs `work` where messages are matched by their order: no later operation submits any before
/// `work` has submitted its last.
///
/// \param called  when the program called the operation, as the transport marked it.
template <device_backend Backend, class Moment>
task in_order(operation_context<Backend> context, Moment called, task work) {
  co_await detail::order::hold;
  context.transport().follow(std::move(called));
  std::exception_ptr failure;
  try {
    co_await std::move(work);
  } catch (...) {
    failure = std::current_exception();
  }
  // Also after a failure: what the device still does, it does with the caller's memory.
  try {
    auto rest = context.transport().finished();
    co_await detail::order::release;
    co_await rest;
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace bluefog
