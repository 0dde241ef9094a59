// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <bluefog/core/error.hpp>

namespace bluefog {

/// A type that says itself what its bytes are: `value.to_bytes()` gives a contiguous range of
/// `std::byte`, of which `T::from_bytes(std::span<const std::byte>)` makes an equal value.
template <class T>
concept byte_convertible = requires(const T& value, std::span<const std::byte> bytes) {
  { std::span<const std::byte>(value.to_bytes()) };
  { T::from_bytes(bytes) } -> std::convertible_to<T>;
};

namespace detail {

/// How the values of a type become bytes and come back; defined for the types that can.
///
/// `write` appends to a vector of bytes; `read` takes from the front of a span of them.
template <class T>
struct object_format;

template <class T>
concept has_format =
    requires(const T& value, std::vector<std::byte>& out, std::span<const std::byte>& in) {
      object_format<T>::write(value, out);
      { object_format<T>::read(in) } -> std::same_as<T>;
    };

/// Plain data. Pointers and views are left out: what they point to lies on one rank only.
template <class T>
concept plain_object =
    std::is_trivially_copyable_v<T> && std::is_object_v<T> && !std::is_pointer_v<T> &&
    !std::is_member_pointer_v<T> && !std::is_array_v<T> && !std::is_null_pointer_v<T> &&
    !std::ranges::borrowed_range<T> && !byte_convertible<T>;

inline void append(std::vector<std::byte>& out, const void* data, std::size_t bytes) {
  const auto* first = static_cast<const std::byte*>(data);
  out.insert(out.end(), first, first + bytes);
}

/// Takes `bytes` bytes from the front of `in`.
[[nodiscard]] inline std::span<const std::byte> take(std::span<const std::byte>& in,
                                                     std::uint64_t bytes) {
  expects<mismatch_error>(bytes <= in.size(), "broadcast_object: the root sent too few bytes");
  const auto taken = in.first(static_cast<std::size_t>(bytes));
  in = in.subspan(taken.size());
  return taken;
}

template <plain_object T>
struct object_format<T> {
  static void write(const T& value, std::vector<std::byte>& out) {
    append(out, &value, sizeof value);
  }
  static T read(std::span<const std::byte>& in) {
    struct alignas(T) {
      std::byte bytes[sizeof(T)];
    } raw;
    std::memcpy(raw.bytes, take(in, sizeof(T)).data(), sizeof(T));
    return std::bit_cast<T>(raw);
  }
};

template <byte_convertible T>
struct object_format<T> {
  static void write(const T& value, std::vector<std::byte>& out) {
    const auto bytes = value.to_bytes();
    const std::span<const std::byte> view(bytes);
    object_format<std::uint64_t>::write(view.size(), out);
    append(out, view.data(), view.size());
  }
  static T read(std::span<const std::byte>& in) {
    const auto length = object_format<std::uint64_t>::read(in);
    return T::from_bytes(take(in, length));
  }
};

template <>
struct object_format<std::string> {
  static void write(const std::string& value, std::vector<std::byte>& out) {
    object_format<std::uint64_t>::write(value.size(), out);
    append(out, value.data(), value.size());
  }
  static std::string read(std::span<const std::byte>& in) {
    const auto length = object_format<std::uint64_t>::read(in);
    const auto bytes = take(in, length);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
};

/// Containers: the number of elements, then one after the other.
template <class Container, class Element>
struct container_format {
  static void write(const Container& values, std::vector<std::byte>& out) {
    object_format<std::uint64_t>::write(values.size(), out);
    for (const auto& each : values) object_format<Element>::write(each, out);
  }
  static Container read(std::span<const std::byte>& in) {
    Container values;
    for (auto left = object_format<std::uint64_t>::read(in); left > 0; --left)
      values.insert(values.end(), object_format<Element>::read(in));
    return values;
  }
};

template <has_format First, has_format Second>
  requires(!plain_object<std::pair<First, Second>>)
struct object_format<std::pair<First, Second>> {
  static void write(const std::pair<First, Second>& value, std::vector<std::byte>& out) {
    object_format<First>::write(value.first, out);
    object_format<Second>::write(value.second, out);
  }
  static std::pair<First, Second> read(std::span<const std::byte>& in) {
    auto first = object_format<First>::read(in);
    return {std::move(first), object_format<Second>::read(in)};
  }
};

template <has_format T>
struct object_format<std::vector<T>> : container_format<std::vector<T>, T> {};
template <has_format Key, has_format T>
struct object_format<std::map<Key, T>> : container_format<std::map<Key, T>, std::pair<Key, T>> {};
template <has_format Key, has_format T>
struct object_format<std::unordered_map<Key, T>>
    : container_format<std::unordered_map<Key, T>, std::pair<Key, T>> {};

}  // namespace detail

/// What can be broadcast as an object: plain data (trivially copyable, no pointer, no view),
/// `std::string`, `std::vector`, `std::map`, `std::unordered_map` and `std::pair` of those, nested
/// at will, and types that are `byte_convertible`.
template <class T>
concept broadcastable_object = std::copyable<T> && detail::has_format<T>;

}  // namespace bluefog
