// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/optim/agreement.hpp>
#include <bluefog/optim/communicating_optimizer.hpp>

namespace bluefog::optim::detail {

/// What an optimizer says of its ranks, by the communicator that it has.
template <backend Backend>
class communicates_over : public communicating_optimizer {
 public:
  [[nodiscard]] int ranks() const noexcept override { return group().size(); }
  [[nodiscard]] int highest(int own) override { return detail::highest(group(), own); }
  [[nodiscard]] std::vector<double> of_every_rank(double value) override {
    return gather_value(group(), value);
  }

 private:
  [[nodiscard]] virtual communicator<Backend>& group() const noexcept = 0;
};

}  // namespace bluefog::optim::detail
