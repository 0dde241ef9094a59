// SPDX-License-Identifier: Apache-2.0
// The data and networks that the examples train with.

#include "../../examples/support/digits.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <vector>

#include <torch/data/dataloader.h>
#include <unistd.h>

#include <bluefog/nn.hpp>
#include <bluefog/thread.hpp>

#include "../../examples/support/nets.hpp"
#include "gpu/learn_digits.hpp"
#include "support/catch.hpp"

namespace fs = std::filesystem;
using bluefog_test::ContainsSubstring;
using file_bytes = std::vector<unsigned char>;

namespace {

/// A folder that goes with its owner. Several ranks may run the same test at once.
class temporary_folder {
 public:
  temporary_folder()
      : path_(fs::temp_directory_path() / ("bluefog_digits_" + std::to_string(getpid()))) {
    fs::create_directories(path_);
  }
  temporary_folder(const temporary_folder&) = delete;
  temporary_folder& operator=(const temporary_folder&) = delete;
  ~temporary_folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }

  fs::path write(const std::string& name, const file_bytes& content) const {
    std::ofstream(path_ / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(content.data()),
               static_cast<std::streamsize>(content.size()));
    return path_ / name;
  }

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void append_number(file_bytes& to, std::size_t number) {
  for (int shift : {24, 16, 8, 0}) to.push_back(static_cast<unsigned char>(number >> shift));
}

/// `count` images of 2x3 pixels; every pixel of image i is i mod 256.
file_bytes images(std::size_t count) {
  file_bytes file;
  for (std::size_t number : {std::size_t{0x803}, count, std::size_t{2}, std::size_t{3}})
    append_number(file, number);
  for (std::size_t i = 0; i < count; ++i) file.insert(file.end(), 6, static_cast<unsigned char>(i));
  return file;
}

/// Sorted labels: the first tenth is 0, and so on.
file_bytes labels(std::size_t count) {
  file_bytes file;
  append_number(file, 0x801);
  append_number(file, count);
  for (std::size_t i = 0; i < count; ++i)
    file.push_back(static_cast<unsigned char>(i * 10 / count));
  return file;
}

const std::string image_name = "train-images-idx3-ubyte";
const std::string label_name = "train-labels-idx1-ubyte";

std::vector<std::int64_t> numbers(const at::Tensor& values) {
  const at::Tensor whole = values.to(at::kLong).contiguous();
  return {whole.data_ptr<std::int64_t>(), whole.data_ptr<std::int64_t>() + whole.numel()};
}

/// The pixel value that image i was filled with, from the scaled one.
at::Tensor raw_pixels(const at::Tensor& scaled) {
  return scaled.mul(0.3081).add(0.1307).mul(255).round().flatten(1).select(1, 0);
}

}  // namespace

TEST_CASE("an IDX file gives the numbers it holds, in its shape", "[nn][idx]") {
  const temporary_folder folder;
  const at::Tensor read = example::read_idx(folder.write("images", images(4)), 3);
  CHECK(read.sizes() == at::IntArrayRef{4, 2, 3});
  CHECK(read.scalar_type() == at::kByte);
  CHECK(numbers(read.flatten(1).select(1, 5)) == std::vector<std::int64_t>{0, 1, 2, 3});
  CHECK(example::read_idx(folder.write("none", labels(0)), 1).numel() == 0);
}

TEST_CASE("a bad IDX file is refused with its name and what is wrong", "[nn][idx]") {
  const temporary_folder folder;
  const auto message = [](const fs::path& file, std::size_t dimensions) {
    try {
      example::read_idx(file, dimensions);
    } catch (const example::data_error& error) {
      CHECK_THAT(error.what(), ContainsSubstring(file.string()));
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };

  CHECK_THAT(message(folder.path() / "absent", 1), ContainsSubstring("cannot be opened"));
  CHECK_THAT(message(folder.write("short", {0, 0, 8}), 1), ContainsSubstring("within its header"));
  CHECK_THAT(message(folder.write("labels", labels(5)), 3),
             ContainsSubstring("starts with 0x801, not 0x803"));
  CHECK_THAT(message(folder.write("zip", {0x1F, 0x8B, 8, 0, 0, 0}), 1),
             ContainsSubstring("gunzip"));

  file_bytes truncated = images(3);
  truncated.pop_back();
  CHECK_THAT(message(folder.write("truncated", truncated), 3),
             ContainsSubstring("holds 17 bytes of data, its header says 18"));
  file_bytes longer = images(3);
  longer.push_back(0);
  CHECK_THAT(message(folder.write("longer", longer), 3), ContainsSubstring("holds 19 bytes"));
}

TEST_CASE("images and labels that do not belong together are refused", "[nn][idx]") {
  const temporary_folder folder;
  const auto pixels = folder.write(image_name, images(10));
  CHECK_THROWS_WITH(example::read_images(pixels, folder.write("nine", labels(9))),
                    ContainsSubstring("nine: holds 9 labels") && ContainsSubstring("10 images"));
  file_bytes wrong = labels(10);
  wrong.back() = 10;
  CHECK_THROWS_WITH(example::read_images(pixels, folder.write("wrong", wrong)),
                    ContainsSubstring("label above 9"));
  CHECK_THROWS_WITH(example::load_digits(folder.path() / "absent"),
                    ContainsSubstring("is not a folder"));
}

TEST_CASE("every tenth digit is held out, the others are shuffled, none is lost", "[nn][digits]") {
  const temporary_folder folder;
  folder.write(image_name, images(200));
  folder.write(label_name, labels(200));
  const auto data = example::load_digits(folder.path());
  REQUIRE(data.train.size() == 180);
  REQUIRE(data.test.size() == 20);

  const auto train = data.train.select(at::arange(180));
  const auto test = data.test.select(at::arange(20));
  CHECK(train.data.sizes() == at::IntArrayRef{180, 1, 2, 3});
  CHECK(numbers(raw_pixels(test.data)) == numbers(at::arange(9, 200, 10)));
  CHECK(numbers(test.target) == numbers(raw_pixels(test.data).div(20, "floor")));

  // An image carries its number, and 20 in a row have one label: pairs must have stayed together.
  CHECK(numbers(train.target) == numbers(raw_pixels(train.data).div(20, "floor")));
  const auto kept = at::arange(200).masked_select(at::arange(200).remainder(10).ne(9));
  CHECK(numbers(std::get<0>(raw_pixels(train.data).sort())) == numbers(kept));
  // The file has 0s alone in its first tenth; a random tenth holds many digits.
  CHECK(std::get<0>(at::_unique(train.target.narrow(0, 0, 18))).numel() > 4);
}

TEST_CASE("a separate test file is used where there is one", "[nn][digits]") {
  const temporary_folder folder;
  folder.write(image_name, images(30));
  folder.write(label_name, labels(30));
  folder.write("t10k-images-idx3-ubyte", images(10));
  folder.write("t10k-labels-idx1-ubyte", labels(10));
  const auto data = example::load_digits(folder.path());
  CHECK(data.train.size() == 30);
  CHECK(data.test.size() == 10);
}

TEST_CASE("a data loader yields whole batches of each rank's share", "[nn][digits]") {
  const temporary_folder folder;
  folder.write(image_name, images(50));
  folder.write(label_name, labels(50));
  const auto data = example::load_digits(folder.path());
  std::vector<std::int64_t> seen;
  for (int rank = 0; rank < 3; ++rank) {
    const bluefog::nn::distributed_sampler sampler(*data.train.size(), rank, 3);
    const auto loader = torch::data::make_data_loader(data.train, sampler, /*batch_size=*/4);
    for (const auto& batch : *loader) {
      CHECK(batch.data.size(0) == batch.target.size(0));
      for (auto number : numbers(raw_pixels(batch.data))) seen.push_back(number);
    }
  }
  std::sort(seen.begin(), seen.end());
  CHECK(seen == numbers(at::arange(50).masked_select(at::arange(50).remainder(10).ne(9))));
}

TEST_CASE("a network depends on its seed alone, also when threads make several", "[nn][nets]") {
  const auto parameters = [](const std::string& kind, std::uint64_t seed) {
    std::vector<at::Tensor> flat;
    for (const auto& parameter : example::make_net(kind, seed)->parameters())
      flat.push_back(parameter.detach().flatten());
    return at::cat(flat);
  };
  for (const std::string kind : {"cnn", "mlp"}) {
    const at::Tensor expected = parameters(kind, 5);
    std::vector<at::Tensor> made(4);
    std::vector<std::thread> threads;
    for (auto& result : made) threads.emplace_back([&] { result = parameters(kind, 5); });
    for (auto& thread : threads) thread.join();
    for (const auto& result : made) CHECK(result.equal(expected));
    CHECK_FALSE(parameters(kind, 6).equal(expected));

    auto net = example::make_net(kind, 5);
    const at::Tensor output = net->forward(at::zeros({3, 1, 28, 28}));
    CHECK(output.sizes() == at::IntArrayRef{3, 10});
    CHECK(output.exp().sum(1).allclose(at::ones({3})));
  }
  CHECK_THROWS_AS(example::make_net("rnn", 1), std::invalid_argument);
}

// What tests/gpu.sh does on a GPU.
TEST_CASE("ranks that see half of the digits each learn all of them with mixed precision",
          "[nn][digits][thread]") {
  const fs::path folder = fs::path(__FILE__).parent_path() / "../../.data/mnist";
  if (!fs::exists(folder / image_name)) {
    WARN("left out: there are no digits in " << folder.string());
    return;
  }
  std::vector<double> recognized(2);
  bluefog::run_threads(2, [&](auto& comm) {
    recognized[static_cast<std::size_t>(comm.rank())] =
        bluefog_test::gpu::learn_digits(comm, at::kCPU, folder, /*epochs=*/1);
  });
  for (const double share : recognized) CHECK(share >= bluefog_test::gpu::digits_goal);
}
