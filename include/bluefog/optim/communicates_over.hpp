// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/gather.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/optim/communicating_optimizer.hpp>
#include <bluefog/optim/transfer.hpp>

namespace bluefog::optim::detail {

/// What an optimizer says of its ranks, by the communicator that it has.
template <backend Backend>
class communicates_over : public communicating_optimizer {
 public:
  [[nodiscard]] int ranks() const noexcept override { return group().size(); }

  [[nodiscard]] int highest(int own) override {
    const auto number = std::make_shared<std::int32_t>(own);
    const mutable_buffer value = as_mutable_buffer(std::span(number.get(), 1));
    run(bluefog::detail::check_allreduce(group(), value, value, reduce_op::max, {}),
        [&](auto context) {
          return bluefog::detail::allreduce_task(context, value, value, reduce_op::max, scope::all,
                                                 number);
        });
    return *number;
  }

  /// Control traffic.
  [[nodiscard]] std::vector<double> of_every_rank(const std::vector<double>& values) override {
    const auto all = std::make_shared<std::vector<double>>();
    run({.operation = "comparison of ranks"},
        [&](auto context) { return gather_equal(context, values, all); });
    return std::move(*all);
  }

 private:
  [[nodiscard]] virtual communicator<Backend>& group() const noexcept = 0;
  /// Waits for an operation on `group()`.
  virtual void finish(transfer& started) { started.wait(); }

  template <class Make>
  void run(call_description call, Make make) {
    transfer started(group().driver(), group().start(std::move(call), std::move(make)));
    finish(started);
  }
};

}  // namespace bluefog::optim::detail
