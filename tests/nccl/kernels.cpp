// SPDX-License-Identifier: Apache-2.0
// The CUDA source, run on the host, against the host's kernels.
#include "support/nccl_stand_in/kernels.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <bluefog/core/kernels.hpp>
#include <bluefog/nccl/kernels.hpp>

#include "nccl/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

constexpr std::array all_dtypes{dtype::boolean, dtype::uint8,  dtype::int8,    dtype::int16,
                                dtype::int32,   dtype::int64,  dtype::float16, dtype::bfloat16,
                                dtype::float32, dtype::float64};

using bytes = std::vector<std::byte>;

/// Values of `type`, among them what rounds, overflows and is not a number; `offset` bytes into
/// memory that is aligned to 64.
struct sample_array {
  sample_array(dtype type, std::int64_t count, unsigned seed, std::size_t offset)
      : memory(static_cast<std::size_t>(count) * size_of(type) + 128) {
    auto* first =
        memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) + offset;
    buffer = {first, count, type};
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < count; ++i) {
      std::byte* place = first + static_cast<std::size_t>(i) * size_of(type);
      if (type == dtype::boolean) {
        *place = static_cast<std::byte>(random() % 2);
      } else if (is_floating(type)) {
        const double special[] = {0.0,   -0.0,  1e-7, -3e-8,
                                  65504, 70000, 1e30, std::numeric_limits<double>::infinity()};
        const double value = random() % 10 == 0 ? special[random() % 8]
                                                : std::normal_distribution<double>(0, 100)(random);
        double wide = value;
        kernel::convert({place, 1, type},
                        {reinterpret_cast<const std::byte*>(&wide), 1, dtype::float64});
      } else {
        for (std::size_t k = 0; k < size_of(type); ++k) place[k] = static_cast<std::byte>(random());
      }
    }
  }
  sample_array(const sample_array&) = delete;
  sample_array& operator=(const sample_array&) = delete;

  [[nodiscard]] bytes content() const { return {buffer.data, buffer.data + buffer.bytes()}; }

  bytes memory;
  mutable_buffer buffer;
};

/// \return whether both hold the same bits; any value that is not a number equals any other.
bool same(const_buffer a, const_buffer b) {
  for (std::int64_t i = 0; i < a.count; ++i) {
    const auto one = a.slice(i, 1);
    const auto other = b.slice(i, 1);
    if (std::memcmp(one.data, other.data, one.bytes()) == 0) continue;
    double x = 0;
    double y = 0;
    if (!is_floating(a.type)) return false;
    kernel::convert({reinterpret_cast<std::byte*>(&x), 1, dtype::float64}, one);
    kernel::convert({reinterpret_cast<std::byte*>(&y), 1, dtype::float64}, other);
    if (x == x || y == y) return false;
  }
  return true;
}

/// The device's kernels, and a stream for them.
struct device {
  nccl::unique_stream stream = nccl::make_stream();
  const nccl::kernels& kernels = nccl::kernels::of(0);

  void finish() const {
    const auto end = nccl::record(stream.get());
    while (!nccl::is_over(end.get())) std::this_thread::yield();
  }
};

}  // namespace

TEST_CASE("the structures of the kernels' arguments are the same on both sides",
          "[nccl][kernels]") {
  CHECK(stand_in::find_kernel("bluefog_mix")->argument_bytes == sizeof(nccl::mix_arguments));
  CHECK(stand_in::find_kernel("bluefog_reduce")->argument_bytes == sizeof(nccl::reduce_arguments));
  CHECK(stand_in::find_kernel("bluefog_convert")->argument_bytes ==
        sizeof(nccl::convert_arguments));
}

TEST_CASE("the device's weighted sum is the host's, bit for bit", "[nccl][kernels]") {
  const device on;
  for (const dtype type : {dtype::float16, dtype::bfloat16, dtype::float32, dtype::float64})
    for (const std::int64_t count : {0, 1, 7, 64, 1003})
      for (const std::size_t inputs : {0U, 1U, 3U})
        for (const std::size_t offset : {std::size_t{0}, size_of(type)}) {
          sample_array self(type, count, 1, offset);
          sample_array host(type, count, 9, 0);
          std::vector<std::unique_ptr<sample_array>> arrays;
          std::vector<kernel::weighted_input> weighted;
          for (std::size_t i = 0; i < inputs; ++i) {
            arrays.push_back(
                std::make_unique<sample_array>(type, count, static_cast<unsigned>(i) + 2, 0));
            weighted.push_back({1.0 / (static_cast<double>(i) + 3), arrays.back()->buffer.data});
          }
          kernel::mix(host.buffer, 0.3, self.buffer, weighted);
          on.kernels.mix(on.stream.get(), self.buffer, 0.3, self.buffer, weighted);
          on.finish();
          INFO(type << " [" << count << "], " << inputs << " inputs");
          CHECK(same(self.buffer, host.buffer));
        }
}

TEST_CASE("the device's reductions are the host's, bit for bit", "[nccl][kernels]") {
  const device on;
  for (const dtype type : all_dtypes)
    for (const reduce_op op :
         {reduce_op::average, reduce_op::sum, reduce_op::min, reduce_op::max, reduce_op::product})
      for (const std::int64_t count : {1, 77}) {
        if (op == reduce_op::average && !is_floating(type)) continue;
        sample_array a(type, count, 1, 0);
        sample_array b(type, count, 2, 0);
        sample_array c(type, count, 3, size_of(type));
        sample_array host(type, count, 4, 0);
        sample_array device(type, count, 5, 0);
        const std::vector<const_buffer> inputs{a.buffer, b.buffer, c.buffer};
        kernel::reduce(op, host.buffer, inputs);
        on.kernels.reduce(on.stream.get(), op, device.buffer, inputs);
        on.finish();
        INFO(type << ", operation " << static_cast<int>(op));
        CHECK(same(device.buffer, host.buffer));
      }
}

TEST_CASE("more inputs than one launch takes are combined by several", "[nccl][kernels]") {
  const device on;
  constexpr std::int64_t count = 5;
  std::vector<std::unique_ptr<sample_array>> arrays;
  std::vector<kernel::weighted_input> weighted;
  std::vector<const_buffer> inputs;
  for (unsigned i = 0; i < 500; ++i) {
    arrays.push_back(std::make_unique<sample_array>(dtype::float64, count, i + 1, 0));
    weighted.push_back({1.0 / (i + 1), arrays.back()->buffer.data});
    inputs.push_back(arrays.back()->buffer);
  }
  sample_array self(dtype::float64, count, 1000, 0);
  sample_array host(dtype::float64, count, 1001, 0);
  kernel::mix(host.buffer, 0.5, self.buffer, weighted);
  on.kernels.mix(on.stream.get(), self.buffer, 0.5, self.buffer, weighted);
  on.finish();
  CHECK(same(self.buffer, host.buffer));
  kernel::reduce(reduce_op::average, host.buffer, inputs);
  on.kernels.reduce(on.stream.get(), reduce_op::average, self.buffer, inputs);
  on.finish();
  CHECK(same(self.buffer, host.buffer));
  CHECK_THROWS_AS(on.kernels.reduce(on.stream.get(), reduce_op::sum, arrays.back()->buffer, inputs),
                  usage_error);
}

TEST_CASE("the device's conversions are the host's, bit for bit", "[nccl][kernels]") {
  const device on;
  for (const dtype from : {dtype::float16, dtype::bfloat16, dtype::float32, dtype::float64})
    for (const dtype to : {dtype::float16, dtype::bfloat16, dtype::float32, dtype::float64}) {
      sample_array in(from, 2001, 1, 0);
      sample_array host(to, 2001, 2, 0);
      sample_array device(to, 2001, 3, 0);
      kernel::convert(host.buffer, in.buffer);
      on.kernels.convert(on.stream.get(), device.buffer, in.buffer);
      on.finish();
      INFO(from << " to " << to);
      CHECK(same(device.buffer, host.buffer));
    }
}
