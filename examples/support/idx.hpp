// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <ios>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

namespace example {

/// A file does not hold what it should. The message starts with its path.
class data_error : public std::runtime_error {
 public:
  data_error(const std::filesystem::path& file, const std::string& what)
      : std::runtime_error(file.string() + ": " + what) {}
};

namespace detail {

/// Reads a big-endian number of four bytes, as IDX headers have them.
inline std::uint32_t read_number(std::istream& in, const std::filesystem::path& file) {
  std::array<char, 4> bytes{};
  if (!in.read(bytes.data(), bytes.size())) throw data_error(file, "ends within its header");
  std::uint32_t number = 0;
  for (char byte : bytes) number = (number << 8U) | static_cast<unsigned char>(byte);
  return number;
}

inline std::string hexadecimal(std::uint32_t number) {
  std::ostringstream text;
  text << "0x" << std::hex << number;
  return text.str();
}

}  // namespace detail

/// Reads a file of unsigned bytes in IDX format, the one MNIST comes in, of any size.
///
/// \param dimensions  how many the file must have: 1 for labels, 3 for images.
/// \return uint8 of the shape that the file's header says.
/// \throws data_error if the file is missing, compressed, of another kind, too short or too long.
inline at::Tensor read_idx(const std::filesystem::path& file, std::size_t dimensions) {
  std::ifstream in(file, std::ios::binary);
  if (!in) throw data_error(file, "cannot be opened");

  const std::uint32_t magic = detail::read_number(in, file);
  const auto expected = static_cast<std::uint32_t>(0x800 + dimensions);  // 8: unsigned bytes
  if (magic >> 16U == 0x1F8B) throw data_error(file, "is compressed, unpack it with gunzip");
  if (magic != expected)
    throw data_error(file, "is no IDX file of bytes in " + std::to_string(dimensions) +
                               " dimensions: starts with " + detail::hexadecimal(magic) + ", not " +
                               detail::hexadecimal(expected));

  std::vector<std::int64_t> shape;
  std::uintmax_t bytes = 1;
  for (std::size_t i = 0; i < dimensions; ++i) {
    shape.push_back(detail::read_number(in, file));
    bytes *= static_cast<std::uintmax_t>(shape.back());
  }
  const std::uintmax_t present = std::filesystem::file_size(file) - 4 * (1 + dimensions);
  if (present != bytes)
    throw data_error(file, "holds " + std::to_string(present) + " bytes of data, its header says " +
                               std::to_string(bytes));

  at::Tensor values = at::empty(shape, at::kByte);
  if (!in.read(reinterpret_cast<char*>(values.data_ptr<std::uint8_t>()),
               static_cast<std::streamsize>(bytes)))
    throw data_error(file, "cannot be read");
  return values;
}

/// Grey images with a label each, in memory; yields whole batches, scaled as for MNIST.
///
/// A batch is one example: data float32 of shape (batch, 1, height, width), with MNIST's mean and
/// standard deviation taken out, and target int64 of shape (batch). Copies share the memory.
class image_dataset
    : public torch::data::datasets::BatchDataset<image_dataset, torch::data::Example<>> {
 public:
  /// \param images  uint8 of shape (count, height, width).
  /// \param labels  uint8 or int64 of shape (count).
  image_dataset(at::Tensor images, const at::Tensor& labels)
      : images_(images.unsqueeze(1)), labels_(labels.to(at::kLong)) {}

  torch::data::Example<> get_batch(c10::ArrayRef<std::size_t> indices) override {
    const at::Tensor rows = at::empty({static_cast<std::int64_t>(indices.size())}, at::kLong);
    std::copy(indices.begin(), indices.end(), rows.data_ptr<std::int64_t>());
    return select(rows);
  }

  std::optional<std::size_t> size() const override {
    return static_cast<std::size_t>(images_.size(0));
  }

  /// \return the examples in `rows` (int64), as one batch.
  [[nodiscard]] torch::data::Example<> select(const at::Tensor& rows) const {
    constexpr double mean = 0.1307, deviation = 0.3081;
    const at::Tensor scaled = images_.index_select(0, rows).to(at::kFloat).div_(255);
    return {scaled.sub_(mean).div_(deviation), labels_.index_select(0, rows)};
  }

  /// \return a data set of the images in `rows` (int64) alone, in that order.
  [[nodiscard]] image_dataset subset(const at::Tensor& rows) const {
    return {images_.index_select(0, rows).squeeze(1), labels_.index_select(0, rows)};
  }

  [[nodiscard]] const at::Tensor& labels() const noexcept { return labels_; }

 private:
  at::Tensor images_;
  at::Tensor labels_;
};

/// Reads images and their labels from two IDX files.
///
/// \throws data_error as `read_idx`, and if the counts differ or a label is 10 or more.
inline image_dataset read_images(const std::filesystem::path& images,
                                 const std::filesystem::path& labels) {
  at::Tensor pixels = read_idx(images, 3);
  const at::Tensor classes = read_idx(labels, 1);
  if (pixels.size(0) != classes.size(0))
    throw data_error(labels, "holds " + std::to_string(classes.size(0)) + " labels, but " +
                                 images.string() + " holds " + std::to_string(pixels.size(0)) +
                                 " images");
  if (classes.numel() > 0 && classes.max().item<int>() > 9)
    throw data_error(labels, "holds a label above 9");
  return {std::move(pixels), classes};
}

}  // namespace example
