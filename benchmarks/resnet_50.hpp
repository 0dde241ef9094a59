// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <vector>

/// \return element counts as in ResNet-50: 53 convolutions, a pair per normalisation, a last layer.
inline std::vector<std::size_t> resnet_50() {
  std::vector<std::size_t> counts{64 * 3 * 49, 64, 64};
  std::size_t in = 64;
  const std::array<std::size_t, 4> blocks{3, 4, 6, 3};
  for (std::size_t stage = 0; stage < blocks.size(); ++stage) {
    const std::size_t width = std::size_t{64} << stage;
    const std::size_t out = 4 * width;
    for (std::size_t block = 0; block < blocks[stage]; ++block) {
      for (const std::size_t weights : {in * width, width * width * 9, width * out}) {
        const std::size_t channels = weights == width * out ? out : width;
        counts.insert(counts.end(), {weights, channels, channels});
      }
      if (block == 0) counts.insert(counts.end(), {in * out, out, out});
      in = out;
    }
  }
  counts.insert(counts.end(), {in * 1000, 1000});
  return counts;
}
