// SPDX-License-Identifier: Apache-2.0
// bluefog_gpu_tensors operations FILE RANK SIZE     every operation on CUDA tensors
// bluefog_gpu_tensors optimizers FILE RANK SIZE     every optimizer on CUDA parameters
// bluefog_gpu_tensors digits FILE RANK SIZE FOLDER  learns with mixed precision
// bluefog_gpu_tensors unscale                       checks of scaled gradients
// bluefog_gpu_tensors average                       the averaging kernel against libtorch's way
// bluefog_gpu_tensors schedule                      what of communication is hidden behind compute
//
// SIZE processes meet by way of FILE; FOLDER has the digits. Prints lines: "pass NAME",
// "fail NAME: [rank R: ]why", or "figure NAME: VALUE".
#include "gpu/program/tensors.hpp"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // what was found remains, however this ends
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    const int failures = bluefog_test::gpu::program::run(words, argv);
    if (failures < 0) std::fprintf(stderr, "what to run is said at the top of tensors.cpp\n");
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
  } catch (const std::exception& problem) {
    bluefog_test::gpu::say_end(words, problem);
  }
  return EXIT_FAILURE;
}
