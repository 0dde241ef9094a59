// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <bluefog/optim/backward_ledger.hpp>
#include <bluefog/optim/gradient_watch.hpp>
#include <bluefog/tensor/arena.hpp>

namespace bluefog::optim::detail {

/// Notes which backwards reach an optimizer's parameters, where nothing else is to be known of
/// them, so that its step uses them up for other optimizers too.
class backward_log {
 public:
  /// Watches the parameters of `arena`; `anew` if they may be others than before.
  void follow(const parameter_arena& arena, bool anew) {
    if (!anew && watch_.intact()) return;
    watch_ = gradient_watch(numbers_);
    for (std::size_t i = 0; i < arena.size(); ++i) watch_.add(arena.tensor(i), i);
  }
  /// A step has used the gradients, or they are given up.
  void stepped() { backward_ledger::consume(std::exchange(numbers_->all, {})); }

 private:
  struct numbers final : gradient_listener {
    void backward_began(int number, bool /*anew*/) override { all.push_back(number); }
    void gradient_ready(std::size_t /*index*/) override {}
    std::vector<int> all;
  };

  std::shared_ptr<numbers> numbers_ = std::make_shared<numbers>();
  gradient_watch watch_;
};

}  // namespace bluefog::optim::detail
