// SPDX-License-Identifier: Apache-2.0

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <new>
#include <set>
#include <thread>
#include <vector>

#include <bluefog/core/scratch.hpp>

#include "support/catch.hpp"

using bluefog::scratch_pool;

TEST_CASE("blocks are aligned, writable and apart", "[core][scratch]") {
  scratch_pool pool;
  std::vector<scratch_pool::block> blocks;
  for (const std::size_t bytes : {1U, 63U, 64U, 65U, 4097U, 100000U}) {
    const auto& block = blocks.emplace_back(pool.acquire(bytes));
    CHECK(reinterpret_cast<std::uintptr_t>(block.data()) % scratch_pool::alignment == 0);
    std::memset(block.data(), static_cast<int>(blocks.size()), bytes);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i)
    CHECK(*blocks[i].data() == static_cast<std::byte>(i + 1));
  CHECK(pool.acquire(0).data() == nullptr);
}

TEST_CASE("memory comes back, for what it fits", "[core][scratch]") {
  scratch_pool pool;
  const std::byte* const first = [&] { return pool.acquire(50000).data(); }();
  CHECK(pool.acquire(40000).data() == first);
  { CHECK(pool.acquire(100).data() != first); }  // would waste it
  CHECK(pool.acquire(60000).data() != first);
  auto taken = pool.acquire(50000);
  CHECK(taken.data() == first);
  CHECK(pool.acquire(50000).data() != first);
}

TEST_CASE("a moved block goes back once", "[core][scratch]") {
  scratch_pool pool;
  auto a = pool.acquire(1000);
  const auto* const data = a.data();
  auto b = std::move(a);
  CHECK(a.data() == nullptr);
  CHECK(b.data() == data);
  scratch_pool::block c;
  c = std::move(b);
  c = {};
  auto d = pool.acquire(1000), e = pool.acquire(1000);
  CHECK(d.data() != e.data());
}

TEST_CASE("a block keeps its pool's memory alive", "[core][scratch]") {
  auto block = [] { return scratch_pool().acquire(1000); }();
  std::memset(block.data(), 1, 1000);
  CHECK(*block.data() == std::byte{1});
}

TEST_CASE("few blocks are kept, the largest", "[core][scratch]") {
  scratch_pool pool;
  std::set<const std::byte*> large;
  {
    std::vector<scratch_pool::block> blocks;
    for (std::size_t i = 0; i < scratch_pool::kept; ++i) blocks.push_back(pool.acquire(64));
    for (std::size_t i = 0; i < scratch_pool::kept; ++i)
      large.insert(blocks.emplace_back(pool.acquire(1U << 20U)).data());
  }
  std::vector<scratch_pool::block> again;
  for (std::size_t i = 0; i < scratch_pool::kept; ++i) {
    again.push_back(pool.acquire(1U << 20U));
    CHECK(large.count(again.back().data()) == 1);
  }
}

namespace {

// What a source has given, and what of it has not come back.
int allocations = 0;
std::map<std::byte*, std::size_t> living;

}  // namespace

TEST_CASE("where freeing is dear, what a step needs is kept, and no more than a few times that",
          "[core][scratch]") {
  constexpr std::size_t most = 100000, at_once = 3;
  {
    scratch_pool pool({.allocate =
                           [](std::size_t bytes) {
                             ++allocations;
                             auto* made = static_cast<std::byte*>(
                                 ::operator new(bytes, std::align_val_t{scratch_pool::alignment}));
                             living[made] = bytes;
                             return made;
                           },
                       .release =
                           [](std::byte* data) noexcept {
                             living.erase(data);
                             ::operator delete(data, std::align_val_t{scratch_pool::alignment});
                           },
                       .dear = true});
    const auto step = [&](std::size_t first, double factor) {
      for (auto bytes = static_cast<double>(first); bytes <= most && bytes >= 100;
           bytes *= factor) {
        std::vector<scratch_pool::block> blocks;
        for (std::size_t i = 0; i < at_once; ++i) {
          blocks.push_back(pool.acquire(static_cast<std::size_t>(bytes)));
          CHECK(living.at(blocks.back().data()) >= static_cast<std::size_t>(bytes));
        }
      }
    };
    const auto freed = [] { return allocations - static_cast<int>(living.size()); };
    step(100, 1.01);
    step(most, 0.97);
    const int before = allocations;
    CHECK(freed() == 0);
    for (int i = 0; i < 3; ++i) step(100, 1.01), step(most, 0.97);
    CHECK(allocations == before);
    CHECK(freed() == 0);

    // More small ones at once than large ones, again and again, in other sizes.
    std::vector<scratch_pool::block> held;
    for (std::size_t bytes = 256; bytes <= most; bytes *= 4) {
      for (std::size_t sum = 0; sum < at_once * most; sum += bytes)
        held.push_back(pool.acquire(bytes));
      held.clear();
    }
    std::size_t total = 0;
    for (const auto& [data, bytes] : living) total += bytes;
    CHECK(total <= 5 * (at_once + 1) * std::bit_ceil(most));
    CHECK(freed() > 0);
  }
  CHECK(living.empty());
}

TEST_CASE("any thread may take and give back", "[core][scratch]") {
  scratch_pool pool;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&pool, t] {
      for (std::size_t i = 0; i < 500; ++i) {
        auto block = pool.acquire(100 + i % 5 * 1000);
        std::memset(block.data(), t, 100);
      }
    });
}
