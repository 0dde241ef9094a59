// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/collective/broadcast_object.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

struct hyperparameters {
  int layers = 0;
  double rate = 0;
  std::array<char, 8> name{};
  bool operator==(const hyperparameters&) const = default;
};

/// A type with bytes of its own making.
class text {
 public:
  text() = default;
  explicit text(std::string words) : words_(std::move(words)) {}
  [[nodiscard]] std::vector<std::byte> to_bytes() const {
    std::vector<std::byte> bytes;
    for (const char each : words_) bytes.push_back(static_cast<std::byte>(each ^ 0x55));
    return bytes;
  }
  [[nodiscard]] static text from_bytes(std::span<const std::byte> bytes) {
    text made;
    for (const std::byte each : bytes) made.words_ += static_cast<char>(each ^ std::byte{0x55});
    return made;
  }
  bool operator==(const text&) const = default;

 private:
  std::string words_;
};

/// A type whose bytes cannot be read back.
struct unreadable {
  [[nodiscard]] std::vector<std::byte> to_bytes() const { return std::vector<std::byte>(3); }
  [[nodiscard]] static unreadable from_bytes(std::span<const std::byte>) {
    throw usage_error("unreadable: no");
  }
};

/// A type that has no bytes today.
struct unwritable {
  [[nodiscard]] std::vector<std::byte> to_bytes() const { throw std::runtime_error("no bytes"); }
  [[nodiscard]] static unwritable from_bytes(std::span<const std::byte>) { return {}; }
};

template <class Comm, class T>
void arrives(Comm& comm, const T& value, const T& other) {
  for (int root = 0; root < comm.size(); ++root) {
    const T& own = comm.rank() == root ? value : other;
    require(broadcast_object(comm, own, root) == value, "not what the root has");
    auto later = broadcast_object_nonblocking(comm, own, root);
    require(later.wait() == value, "not what the root has, in flight");
  }
}

}  // namespace

TEST_CASE("what has no bytes of its own is no object", "[collective][broadcast_object]") {
  STATIC_REQUIRE(broadcastable_object<hyperparameters>);
  STATIC_REQUIRE(broadcastable_object<text>);
  STATIC_REQUIRE(broadcastable_object<std::map<std::string, std::vector<text>>>);
  STATIC_REQUIRE_FALSE(broadcastable_object<int*>);
  STATIC_REQUIRE_FALSE(broadcastable_object<std::vector<const char*>>);
  STATIC_REQUIRE_FALSE(broadcastable_object<std::string_view>);
  STATIC_REQUIRE_FALSE(broadcastable_object<std::span<int>>);
  STATIC_REQUIRE_FALSE(broadcastable_object<std::unique_ptr<int>>);
  STATIC_REQUIRE_FALSE(broadcastable_object<std::function<void()>>);
}

RANKS_TEST("broadcast_object carries plain data, strings, containers and types with bytes",
           "[collective][broadcast_object]") {
  arrives(comm, 42, 0);
  arrives(comm, hyperparameters{3, 0.1, {'n', 'e', 't'}}, hyperparameters{});
  arrives(comm, std::string("a\0b", 3), std::string());
  arrives(comm, std::string(100000, 'x'), std::string("short"));
  arrives(comm, std::vector<double>{}, std::vector<double>{1, 2});
  arrives(comm, std::vector<bool>{true, false, true}, std::vector<bool>{});
  arrives(comm, std::vector<std::vector<std::string>>{{"a", ""}, {}, {"bcd"}}, {});
  arrives(comm,
          std::map<std::string, std::map<int, double>>{{"lr", {{0, 0.1}, {5, 0.01}}}, {"", {}}},
          {{"momentum", {}}});
  arrives(comm, std::unordered_map<int, std::string>{{1, "one"}, {2, "two"}}, {});
  arrives(comm, std::pair<int, std::string>{7, "seven"}, {});
  arrives(comm, text("secret"), text());
  arrives(comm, std::map<int, text>{{1, text("one")}}, {});
}

RANKS_TEST("bytes that cannot be read back are an error where they are read, and no more",
           "[collective][broadcast_object]") {
  if (comm.rank() == 0)
    static_cast<void>(broadcast_object(comm, unreadable{}, 0));
  else
    require_throws<usage_error>(
        [&] { static_cast<void>(broadcast_object(comm, unreadable{}, 0)); });
  std::vector<int> ones(3, 1);
  allreduce(comm, ones, ones, reduce_op::sum);
  require_equal(ones.front(), comm.size());
}

RANKS_TEST("a root that cannot write its object tells the others, and the next one is right",
           "[collective][broadcast_object]") {
  const int root = comm.size() - 1;
  const auto attempt = [&] { static_cast<void>(broadcast_object(comm, unwritable{}, root)); };
  const auto told = concat("broadcast_object: rank ", root, " could not write its object");
  for (int i = 0; i < 2; ++i) {
    if (comm.rank() == root)
      require_contains(require_throws<std::runtime_error>(attempt), "no bytes");
    else
      require_contains(require_throws_soon<peer_error>(attempt), told);
    require_equal(broadcast_object(comm, comm.rank() == root ? 7 : 0, root), 7);
  }
}

RANKS_TEST("broadcast_object refuses a root that does not exist",
           "[collective][broadcast_object]") {
  const auto text = require_throws<usage_error>(
      [&] { static_cast<void>(broadcast_object(comm, 1, comm.size())); });
  require_contains(text, "broadcast_object: root must be in [0, ");
}
