// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "idx.hpp"

namespace example {

/// Handwritten digits to learn from, and others to test on; the same on every rank.
struct digits {
  image_dataset train;
  image_dataset test;
};

/// Loads MNIST, or a part of it, from a folder with the original file names.
///
/// A test set is read from the t10k files if they are there, else every tenth image is held out.
/// The training images are shuffled with a fixed seed, because a file may be sorted by label, and
/// then a rank's share would hold few of the ten digits.
///
/// \throws data_error that names the file and what is wrong with it.
inline digits load_digits(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder))
    throw data_error(
        folder,
        "is not a folder; examples/quickstart.sh puts 5,000 digits into .data/mnist of "
        "the checkout");
  const image_dataset all =
      read_images(folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte");
  const at::Tensor number = at::arange(all.labels().size(0), at::kLong);
  at::Tensor train_rows = number;
  image_dataset test = all;
  if (std::filesystem::exists(folder / "t10k-images-idx3-ubyte")) {
    test = read_images(folder / "t10k-images-idx3-ubyte", folder / "t10k-labels-idx1-ubyte");
  } else {
    const at::Tensor held_out = number.remainder(10).eq(9);
    test = all.subset(held_out.nonzero().squeeze(1));
    train_rows = held_out.logical_not().nonzero().squeeze(1);
  }
  const auto seed = at::detail::createCPUGenerator(1);
  const at::Tensor order = at::randperm(train_rows.size(0), seed, at::kLong);
  return {all.subset(train_rows.index_select(0, order)), std::move(test)};
}

}  // namespace example
