// SPDX-License-Identifier: Apache-2.0
//
// The weighted sum that every averaging step ends in, in place, of d + 1 arrays of floats in host
// memory: how close it comes to what one core can move, and how it compares with libtorch's
// x.mul_(w), x.add_(y, w), ... (when its headers are there).
//
//   averaging_kernels [REPEATS]
//
// The contestants alternate within each round. Of a repeat counts the median over its rounds of
// their ratio in the same round; printed are the median, least and largest of the repeats. The
// limit is a hand-written triad x = a x + b y in the same memory, of which x is one half and y the
// other; it counts 3 bytes moved per byte of x, the sum of d + 1 arrays d + 2. Of these the triad
// reads two thirds, the sum of four arrays four fifths: where reading is what takes the time,
// beyond the second-level cache, even a perfect sum of four reaches 5/6 of the triad. So "read"
// gives the ratio of the bytes read per second, beside that of all bytes. If a triad of 100 MiB ran
// more than 15 % faster or slower at the end than at the start, the machine was busy: valid is
// false, and the numbers should not be used.

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <random>
#include <span>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __has_include(<ATen/Functions.h>)
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#endif

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/kernels/mix.hpp>

#include "first_line.hpp"

namespace {

constexpr int warm_ups = 2;
constexpr int rounds = 9;
constexpr std::size_t mebibyte = std::size_t{1} << 20;

/// x = a x + b y.
#if defined(__x86_64__)
[[gnu::target("avx2,fma")]]
#endif
void triad(std::span<float> x, std::span<const float> y, float a, float b) {
  std::size_t i = 0;
#if defined(__x86_64__)
  const __m256 factor = _mm256_set1_ps(a);
  const __m256 other = _mm256_set1_ps(b);
  for (; i + 16 <= x.size(); i += 16)
    for (std::size_t k : {i, i + 8}) {
      const __m256 scaled = _mm256_mul_ps(factor, _mm256_loadu_ps(x.data() + k));
      _mm256_storeu_ps(x.data() + k, _mm256_fmadd_ps(other, _mm256_loadu_ps(y.data() + k), scaled));
    }
#endif
  for (; i < x.size(); ++i) x[i] = std::fma(b, y[i], a * x[i]);
}

std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> draw(-1, 1);
  std::vector<float> values(count);
  for (float& value : values) value = draw(random);
  return values;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// \return seconds that one of `count` calls takes.
double time_of(const std::function<void()>& work, int count) {
  const auto start = std::chrono::steady_clock::now();
  for (int k = 0; k < count; ++k) work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / count;
}

/// One comparison of the weighted sum with something else.
struct comparison {
  std::string peer;
  double target;
  std::vector<double> ratios;  ///< one per repeat; more is better for us
};

struct result {
  std::size_t inputs;
  std::size_t bytes;
  std::vector<double> gigabytes_per_second;  ///< of ours, one per repeat
  std::vector<comparison> comparisons;
};

/// Times the weighted sum of `inputs` + 1 arrays against its limit and its peer.
result measure(std::size_t inputs, std::size_t bytes, int repeats) {
  const std::size_t count = bytes / sizeof(float);
  const auto weight = static_cast<float>(1.0 / static_cast<double>(inputs + 1));
  const auto start = random_floats(count * (inputs + 1), 1);
  auto memory = start;
  const std::span<float> all(memory);
  const auto x = all.first(count);
  std::vector<bluefog::kernel::weighted_input> weighted;
  for (std::size_t j = 1; j <= inputs; ++j)
    weighted.push_back({weight, bluefog::as_buffer(all.subspan(j * count, count)).data});

  const auto ours = [&] {
    bluefog::kernel::mix(bluefog::as_mutable_buffer(x), weight, bluefog::as_buffer(x), weighted);
  };
  const std::size_t half = all.size() / 2;
  const auto limit = [&] { triad(all.first(half), all.last(half), weight, 1 - weight); };
#if __has_include(<ATen/Functions.h>)
  const auto length = static_cast<std::int64_t>(count);
  auto tensor = at::from_blob(x.data(), {length}, at::kFloat);
  std::vector<at::Tensor> tensors;
  for (std::size_t j = 1; j <= inputs; ++j)
    tensors.push_back(at::from_blob(x.data() + j * count, {length}, at::kFloat));
  const auto peer = [&] {
    tensor.mul_(weight);
    for (const auto& other : tensors) tensor.add_(other, weight);
  };
#endif

  result rows{inputs, bytes, {}, {{"triad", 0.90, {}}}};
#if __has_include(<ATen/Functions.h>)
  rows.comparisons.push_back({"torch mul_, add_", inputs == 1 ? 1.15 : 1.8, {}});
#endif
  const int calls = static_cast<int>(std::max<std::size_t>(1, 64 * mebibyte / bytes));
  for (int repeat = 0; repeat < repeats; ++repeat) {
    memory = start;
    ours();
    for (std::size_t i = 0; i < count; i += 1 + count / 1000) {
      double expected = start[i];
      for (std::size_t j = 1; j <= inputs; ++j)
        expected += static_cast<double>(start[j * count + i]);
      if (std::fabs(x[i] - expected / static_cast<double>(inputs + 1)) > 1e-6) {
        std::cerr << "averaging_kernels: wrong result at element " << i << '\n';
        std::exit(EXIT_FAILURE);
      }
    }
    std::vector<double> speeds;
    std::vector<double> to_limit;
    std::vector<double> to_peer;
    for (int round = -warm_ups; round < rounds; ++round) {
      const double limit_time = time_of(limit, calls);
      const double our_time = time_of(ours, calls);
#if __has_include(<ATen/Functions.h>)
      const double peer_time = time_of(peer, calls);
      if (round >= 0) to_peer.push_back(peer_time / our_time);
#endif
      if (round < 0) continue;
      const double moved = static_cast<double>(inputs + 2) * static_cast<double>(bytes);
      const double triad_moved = 3 * static_cast<double>(half * sizeof(float));
      to_limit.push_back(moved / our_time / (triad_moved / limit_time));
      speeds.push_back(moved / our_time / 1e9);
    }
    rows.gigabytes_per_second.push_back(median(speeds));
    rows.comparisons[0].ratios.push_back(median(to_limit));
    if (!to_peer.empty()) rows.comparisons[1].ratios.push_back(median(to_peer));
  }
  return rows;
}

/// \return GB/s of the triad on 100 MiB.
double calibrate() {
  auto x = random_floats(100 * mebibyte / sizeof(float), 1);
  const auto y = random_floats(x.size(), 2);
  std::vector<double> times;
  for (int k = 0; k < warm_ups + rounds; ++k)
    times.push_back(time_of([&] { triad(x, y, 0.5F, 0.5F); }, 1));
  times.erase(times.begin(), times.begin() + warm_ups);
  return 3 * 100 * static_cast<double>(mebibyte) / median(times) / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::max(1, std::atoi(argv[1])) : 5;
#if __has_include(<ATen/Functions.h>)
  at::set_num_threads(1);
#endif
  std::cout << "load " << first_line_of("/proc/loadavg") << "\n" << first_line_of("/proc/stat");
  const double before = calibrate();

  std::vector<result> results;
  for (std::size_t inputs : {1U, 3U})
    for (std::size_t bytes : {mebibyte / 16, mebibyte, 10 * mebibyte, 100 * mebibyte})
      results.push_back(measure(inputs, bytes, repeats));

  const double after = calibrate();
  const bool valid = std::fabs(after / before - 1) <= 0.15;
  std::cout << "\n"
            << first_line_of("/proc/stat") << "\ntriad of 100 MiB: " << before << " GB/s before, "
            << after << " GB/s after" << (valid ? "" : ": not valid") << "\n\n";

  std::printf("%7s %10s %8s  %-16s %6s %15s %7s %8s\n", "inputs", "KiB", "GB/s", "against", "ratio",
              "least-largest", "target", "read");
  std::string lines;
  for (const auto& row : results)
    for (const auto& [peer, target, ratios] : row.comparisons) {
      const double ratio = median(ratios);
      const auto [least, largest] = std::ranges::minmax(ratios);
      const bool met = ratio >= target;
      const double speed = median(row.gigabytes_per_second);
      const auto streams = static_cast<double>(row.inputs + 1);
      const double read_ratio = ratio * streams / (streams + 1) * 1.5;
      std::printf("%7zu %10zu %8.1f  %-16s %6.2f %7.2f-%7.2f %7.2f", row.inputs, row.bytes / 1024,
                  speed, peer.c_str(), ratio, least, largest, target);
      if (peer == "triad")
        std::printf(" %8.2f", read_ratio);
      else
        std::printf(" %8s", "");
      std::printf(" %s\n", met ? "met" : "MISSED");
      std::array<char, 400> line{};
      std::snprintf(line.data(), line.size(),
                    "{\"id\": \"B01\", \"work\": \"in-place weighted sum\", \"inputs\": %zu, "
                    "\"bytes\": %zu, \"gigabytes_per_second\": %.2f, \"peer\": \"%s\", "
                    "\"limit\": \"triad\", \"ratio\": %.3f, \"least\": %.3f, \"largest\": %.3f, "
                    "\"target\": %.2f, \"met\": %s, \"valid\": %s",
                    row.inputs, row.bytes, speed, peer.c_str(), ratio, least, largest, target,
                    met ? "true" : "false", valid ? "true" : "false");
      lines += line.data();
      lines += peer == "triad" ? ", \"read_ratio\": " + std::to_string(read_ratio) + "}\n" : "}\n";
    }
  std::cout << '\n' << lines;
}
