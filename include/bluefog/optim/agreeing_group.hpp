// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/agreement.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/optim/transfer.hpp>

namespace bluefog::optim::detail {

/// The ranks of an optimizer that averages parameters, which agree on what travels.
///
/// Messages do not say which parameters they hold, so ranks that froze different ones of the same
/// size would mix them. Therefore a rank whose list has changed withdraws, instead of communicating
/// next, and compares lists with the others; if all have changed alike, all do. Ranks that have not
/// changed learn of it when they wait for that rank, directly or through others, or when they next
/// begin to communicate, whichever comes first; they give up what they wait for and compare too.
/// While nothing changes on any rank, nothing is sent for this.
///
/// Where the transport carries no letters, ranks that have not changed cannot learn of it, and the
/// wait ends with a timeout_error.
template <backend Backend>
class agreeing_group {
 public:
  /// Collective. \param optimizer  for messages; static storage.
  agreeing_group(std::string_view optimizer, communicator<Backend>& comm)
      : optimizer_(optimizer), comm_(comm.companion()), meeting_(comm.companion()) {}

  /// \return where the optimizer communicates; another one once lists have been compared anew.
  [[nodiscard]] communicator<Backend>& comm() noexcept { return comm_; }
  [[nodiscard]] const communicator<Backend>& comm() const noexcept { return comm_; }

  /// Compares the first lists. Collective.
  /// \throws mismatch_error, on every rank, that names the first difference.
  template <parameter_list List>
  void adopt(const List& parameters) {
    known_ = signature(parameters);
    lines_ = describe_parameters(parameters);
    expect_equal_lines(optimizer_, meeting_, lines_);
  }

  /// Before a communication: makes sure that lists are still equal. Collective if this rank's has
  /// changed. \throws mismatch_error, on every rank, that names the first difference.
  template <parameter_list List>
  void agree(const List& parameters) {
    if (comm_.size() == 1) return;
    if (const auto difference = std::exchange(untold_, nullptr)) std::rethrow_exception(difference);
    if (!has_signature(parameters, known_)) {
      auto lines = describe_parameters(parameters);
      if (lines != lines_) {
        compare(lines);
        lines_ = std::move(lines);
      }
      known_ = signature(parameters);
    }
    comm_.listen();
    if (comm_.will_lack_rank()) compare(lines_);
  }

  /// A communication begins, which has a number of its own even if nothing travels in it: otherwise
  /// a rank that is ahead would seem to withdraw from one that the others have yet to make.
  void begin() { comm_.pass(); }

  /// Waits for an operation on `comm()`.
  /// \throws what it failed with; mismatch_error, on every rank, if one of them waits in vain for a
  ///         rank whose list has changed.
  void wait(transfer& started) {
    if (!started.over_unless([&] { return comm_.lacks_rank(); })) compare(lines_);
    try {
      started.wait();
    } catch (const error&) {  // perhaps because a rank that waits in vain has given it up
      comm_.listen();
      if (comm_.lacks_rank()) compare(lines_);
      throw;
    }
  }
  /// Waits for an operation whose outcome nobody wants. What ranks have found out meanwhile, the
  /// next `agree` throws.
  void forget(transfer& started) noexcept {
    const int before = differences_;
    try {
      wait(started);
    } catch (const std::exception&) {
      if (differences_ != before) untold_ = std::current_exception();
    }
  }

 private:
  // Collective.
  void compare(const std::vector<std::string>& lines) {
    // First: ranks whose operations fail since this one gives up have to know why.
    comm_.withdraw();
    comm_.give_up();
    std::exception_ptr difference;
    try {
      expect_equal_lines(optimizer_, meeting_, lines);
    } catch (const mismatch_error&) {
      ++differences_;
      difference = std::current_exception();
    }
    comm_ = meeting_.companion();  // messages may be left in the old one
    if (difference) std::rethrow_exception(difference);
  }

  std::string_view optimizer_;
  communicator<Backend> comm_;     // of its own: it is used between the program's operations
  communicator<Backend> meeting_;  // where lists are compared
  parameter_signature known_;
  std::vector<std::string> lines_;  // what all ranks have agreed on
  int differences_ = 0;             // how often ranks have differed
  std::exception_ptr untold_;       // a difference that the program does not know of
};

}  // namespace bluefog::optim::detail
