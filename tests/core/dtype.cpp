// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstdint>
#include <list>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/dtype.hpp>

#include "support/catch.hpp"

using namespace bluefog;

namespace {

constexpr std::array all = {dtype::boolean, dtype::uint8,  dtype::int8,    dtype::int16,
                            dtype::int32,   dtype::int64,  dtype::float16, dtype::bfloat16,
                            dtype::float32, dtype::float64};

}  // namespace

TEST_CASE("a run-time type and its C++ type agree", "[core][dtype]") {
  for (const dtype type : all)
    with_type(type, [&]<class T>() {
      CHECK(dtype_of<T>::value == type);
      CHECK(size_of(type) == sizeof(T));
      CHECK(is_floating(type) ==
            (std::is_floating_point_v<T> || std::same_as<T, float16> || std::same_as<T, bfloat16>));
      CHECK(is_half(type) == (is_floating(type) && sizeof(T) == 2));
    });
}

TEST_CASE("types are written by name, each by its own", "[core][dtype]") {
  std::ostringstream text;
  for (const dtype type : all) text << type << ' ';
  CHECK(text.str() == "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 ");
}

TEST_CASE("integers travel by size, and what has no wire type does not travel", "[core][dtype]") {
  STATIC_REQUIRE(dtype_of<long>::value == dtype::int64);
  STATIC_REQUIRE(dtype_of<long long>::value == dtype::int64);
  STATIC_REQUIRE(element<const float>);
  STATIC_REQUIRE_FALSE(element<unsigned>);
  STATIC_REQUIRE_FALSE(element<long double>);
  STATIC_REQUIRE_FALSE(element<std::string>);
  STATIC_REQUIRE_FALSE(element<int*>);
}

TEST_CASE("a buffer borrows any range of elements in one piece", "[core][buffer]") {
  std::vector<double> x{1, 2, 3};
  const auto whole = as_mutable_buffer(x);
  CHECK((whole.count == 3 && whole.bytes() == 24 && whole.type == dtype::float64));
  const auto tail = whole.slice(1, 2);
  CHECK(*reinterpret_cast<double*>(tail.data) == 2);
  const const_buffer read = tail;
  CHECK((read.count == 2 && read.data == tail.data));
  CHECK(as_buffer(std::array<std::int16_t, 5>{}).bytes() == 10);
  CHECK(as_buffer(std::span<const float>()).count == 0);
  STATIC_REQUIRE(contiguous_elements<std::span<const float>>);
  STATIC_REQUIRE_FALSE(contiguous_elements<std::list<float>>);
  STATIC_REQUIRE_FALSE(contiguous_elements<std::vector<bool>>);
  STATIC_REQUIRE(writable_elements<std::span<float>>);
  STATIC_REQUIRE_FALSE(writable_elements<std::span<const float>>);
  STATIC_REQUIRE_FALSE(writable_elements<const std::vector<float>&>);
}
