// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <mpi.h>
#include <sys/resource.h>

#include "first_line.hpp"

/// How contestants are compared under mpirun: alternating within one job, at least nine rounds
/// after two warm-ups, of each round the time of the slowest rank, and the median of the rounds'
/// ratios; that over several repeats.
namespace protocol {

constexpr int warm_ups = 2;
constexpr int rounds = 9;

inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

inline std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> draw(-1, 1);
  std::vector<float> values(count);
  for (float& value : values) value = draw(random);
  return values;
}

/// \return seconds of processor time that this process has used.
inline double processor_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

/// What one call took: of the slowest rank in time, and on average over the ranks in processor
/// time.
struct cost {
  double seconds = 0;
  double processor = 0;
};

/// Collective. Times `calls` calls of `work`.
template <class Work>
cost time_of(const Work& work, int calls) {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Barrier(MPI_COMM_WORLD);
  const double used = processor_seconds();
  const auto start = std::chrono::steady_clock::now();
  for (int call = 0; call < calls; ++call) work();
  double elapsed =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
  double processor = (processor_seconds() - used) / calls;
  MPI_Allreduce(MPI_IN_PLACE, &elapsed, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, &processor, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  return {elapsed, processor / size};
}

/// Ours against theirs: medians of the repeats' medians.
struct comparison {
  double ratio = 0;            ///< ours / theirs, in time
  double least = 0;            ///< of the repeats
  double largest = 0;          ///< of the repeats
  double processor = 0;        ///< ours / theirs, in processor time
  double ours = 0;             ///< seconds
  double theirs = 0;           ///< seconds
  double extra_processor = 0;  ///< ours - theirs, seconds of processor time
};

/// Collective. Alternates `ours` and `theirs`.
template <class Ours, class Theirs>
comparison compare(const Ours& ours, const Theirs& theirs, int calls, int repeats) {
  std::vector<double> medians, processor, extra_processor, our_seconds, their_seconds;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    std::vector<double> ratios;
    double our_processor = 0, their_processor = 0;
    for (int round = -warm_ups; round < rounds; ++round) {
      const cost mine = time_of(ours, calls);
      const cost other = time_of(theirs, calls);
      if (round < 0) continue;
      ratios.push_back(mine.seconds / other.seconds);
      our_processor += mine.processor;
      their_processor += other.processor;
      our_seconds.push_back(mine.seconds);
      their_seconds.push_back(other.seconds);
    }
    medians.push_back(median(ratios));
    processor.push_back(our_processor / their_processor);
    extra_processor.push_back((our_processor - their_processor) / rounds);
  }
  const auto [least, largest] = std::ranges::minmax(medians);
  return {median(medians),
          least,
          largest,
          median(processor),
          median(our_seconds),
          median(their_seconds),
          median(extra_processor)};
}

/// \return how many calls of one round last long enough to be timed.
inline int calls_for(std::size_t bytes) {
  return static_cast<int>(std::clamp<std::size_t>((std::size_t{8} << 20) / (bytes + 8192), 1, 500));
}

/// \return seconds of x = a x + b y over 100 MiB, the measure of whether the machine is quiet.
inline double triad_seconds() {
  static auto x = random_floats((std::size_t{100} << 20) / sizeof(float), 1);
  static const auto y = random_floats(x.size(), 2);
  std::vector<double> times;
  for (int turn = 0; turn < 5; ++turn) {
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.5F * x[i] + 0.5F * y[i];
    times.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return median(times);
}

/// Whether the machine was equally quiet at start and end; prints what it saw.
class calibration {
 public:
  explicit calibration(int rank) : rank_(rank) {
    if (rank_ == 0) before_ = triad_seconds();
    MPI_Barrier(MPI_COMM_WORLD);
  }

  /// Collective. \return "true" or "false", for the lines of JSON; means something on rank 0.
  std::string valid() {
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank_ != 0) return "false";
    const double after = triad_seconds();
    const bool same = std::fabs(after / before_ - 1) <= 0.15;
    std::printf("\ntriad of 100 MiB: %.1f ms before, %.1f ms after%s; load %s\n\n", before_ * 1e3,
                after * 1e3, same ? "" : ": not valid", first_line_of("/proc/loadavg").c_str());
    return same ? "true" : "false";
  }

 private:
  int rank_;
  double before_ = 0;
};

/// \return whether each rank has a core of its own; without, times across ranks say little.
inline bool enough_cores(int ranks) {
  return static_cast<unsigned>(ranks) <= std::thread::hardware_concurrency();
}

/// Ends the job if a contestant computed something else.
inline void require(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong result: %s\n", what);
  MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
}

}  // namespace protocol
