// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include <unistd.h>

namespace example {

/// \return whether somebody watches standard output: it is a terminal, and so is its parent's.
///
/// Open MPI gives every rank a terminal of its own, also where mpirun's output goes to a file.
inline bool on_terminal() {
  if (isatty(STDOUT_FILENO) == 0) return false;
  std::error_code failure;
  const auto parent = "/proc/" + std::to_string(getppid()) + "/fd/1";
  const std::string target = std::filesystem::read_symlink(parent, failure).string();
  return !failure && (target.starts_with("/dev/pts/") || target.starts_with("/dev/tty"));
}

/// A line on the terminal that fills up while steps are made; nothing where `visible` is false.
///
/// Redrawn at most ten times a second, and wiped by its destructor.
class progress_bar {
 public:
  /// \param label  what is going on, e.g. "epoch 3/10".
  /// \param total  how many steps there will be.
  progress_bar(std::string label, std::size_t total, bool visible = on_terminal())
      : label_(std::move(label)), total_(std::max<std::size_t>(total, 1)), visible_(visible) {}

  progress_bar(const progress_bar&) = delete;
  progress_bar& operator=(const progress_bar&) = delete;
  ~progress_bar() {
    if (drawn_) std::printf("\r\033[K");
    std::fflush(stdout);
  }

  /// Counts one step.
  void advance() {
    ++done_;
    const auto now = std::chrono::steady_clock::now();
    if (!visible_ || now - last_ < std::chrono::milliseconds(100)) return;
    last_ = now;
    drawn_ = true;
    constexpr std::size_t width = 30;
    const std::size_t filled = std::min(width, done_ * width / total_);
    std::printf("\r%s [%s%s] %zu/%zu", label_.c_str(), std::string(filled, '=').c_str(),
                std::string(width - filled, ' ').c_str(), done_, total_);
    std::fflush(stdout);
  }

 private:
  std::string label_;
  std::size_t total_;
  bool visible_;
  bool drawn_ = false;
  std::size_t done_ = 0;
  std::chrono::steady_clock::time_point last_ = {};
};

}  // namespace example
