// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <string>

#include <unistd.h>

#include "first_line.hpp"

/// How much of the machine others took while a benchmark of one process ran, which says how far its
/// times are to be trusted.
class foreign_load {
 public:
  /// Prints it, in cores, with the machine's load. Starts counting when this object is made.
  /// \return it as JSON: a number, or null where /proc does not say.
  [[nodiscard]] std::string report() const {
    const sample end = now();
    if (!start_.known || !end.known) {
      std::printf("\nhow busy the machine was is not known\n\n");
      return "null";
    }
    const double seconds = std::chrono::duration<double>(end.time - start_.time).count();
    const double stolen = (end.stolen - start_.stolen) / seconds;
    // A tick too many counted as one's own is no negative load.
    const double others =
        std::max(0.0, (end.busy - start_.busy - (end.own - start_.own)) / seconds + stolen);
    std::printf("\nothers took %.2f cores, of which the hypervisor %.2f; load %s\n\n", others,
                stolen, first_line_of("/proc/loadavg").c_str());
    return std::to_string(others);
  }

 private:
  /// Seconds of processor time: of all programs together, of other machines on this one's
  /// processors, and of this process.
  struct sample {
    bool known = false;
    double busy = 0;
    double stolen = 0;
    double own = 0;
    std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
  };

  [[nodiscard]] static sample now() {
    std::ifstream file("/proc/stat");
    std::string name;
    double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, hard = 0, soft = 0, stolen = 0;
    sample seen;
    seen.known = static_cast<bool>(file >> name >> user >> nice >> system >> idle >> waiting >>
                                   hard >> soft >> stolen);
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    seen.busy = (user + nice + system + hard + soft) / ticks;
    seen.stolen = stolen / ticks;
    seen.own = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
    return seen;
  }

  sample start_ = now();
};
