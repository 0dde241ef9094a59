// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace bluefog {

/// Temporary memory that is kept for the next operation.
///
/// Fresh memory costs a page fault every 4 KiB, which for large messages is more than the transfer;
/// so blocks are kept, at most `source::kept` of them, unless `source::dear`. Any thread may
/// acquire and release. Copies of the pool share their blocks, and a block keeps them alive.
class scratch_pool {
 public:
  static constexpr std::size_t alignment = 64;  ///< of every block, in bytes: a cache line
  static constexpr std::size_t kept = 8;        ///< by default

  /// Where the memory comes from; by default the heap.
  struct source {
    /// Gives memory of a multiple of `alignment` bytes, aligned to `alignment`, or throws.
    std::byte* (*allocate)(std::size_t bytes) = [](std::size_t bytes) {
      return static_cast<std::byte*>(::operator new(bytes, std::align_val_t{alignment}));
    };
    void (*release)(std::byte* data) noexcept = [](std::byte* data) noexcept {
      ::operator delete(data, std::align_val_t{alignment});
    };
    std::size_t kept = scratch_pool::kept;  ///< most blocks that wait for the next operation
    /// Whether it is dear to allocate and to free, which is then done seldom: blocks have few
    /// sizes, and are kept, however many, as long as those that wait have together at most four
    /// times the bytes that were ever in use at once. That is enough for operations of all sizes
    /// in turn. What is too much is freed when a block is allocated, never when one comes back.
    bool dear = false;
  };

 private:
  struct piece {
    std::unique_ptr<std::byte, void (*)(std::byte*) noexcept> data{nullptr, nullptr};
    std::size_t size = 0;
  };
  struct shelf {
    source from;
    std::mutex mutex;
    std::vector<piece> pieces;  // that wait, the latest last
    std::size_t used = 0;       // bytes, of blocks that somebody has
    std::size_t most_used = 0;
    std::size_t waiting = 0;  // bytes of `pieces`
  };

 public:
  scratch_pool() : scratch_pool(source()) {}
  explicit scratch_pool(source from) : shelf_(std::make_shared<shelf>()) { shelf_->from = from; }

  /// A block of memory; goes back to its pool when destroyed. Its content is unspecified.
  class block {
   public:
    block() noexcept = default;
    block(const block&) = delete;
    block(block&&) noexcept = default;
    block& operator=(const block&) = delete;
    block& operator=(block&& other) noexcept {
      std::swap(piece_, other.piece_);
      std::swap(shelf_, other.shelf_);
      return *this;
    }
    ~block() {
      if (piece_.data) put_back(*shelf_, std::move(piece_));
    }

    [[nodiscard]] std::byte* data() const noexcept { return piece_.data.get(); }

   private:
    friend class scratch_pool;
    block(piece memory, std::shared_ptr<shelf> home) noexcept
        : piece_(std::move(memory)), shelf_(std::move(home)) {}

    piece piece_;
    std::shared_ptr<shelf> shelf_;
  };

  /// \return at least `bytes` bytes, aligned to `alignment`; from the kept blocks if one fits.
  [[nodiscard]] block acquire(std::size_t bytes) {
    if (bytes == 0) return {};
    {
      const std::scoped_lock lock(shelf_->mutex);
      auto best = shelf_->pieces.end();
      for (auto it = shelf_->pieces.begin(); it != shelf_->pieces.end(); ++it)
        if (it->size >= bytes && (best == shelf_->pieces.end() || it->size < best->size)) best = it;
      // A block far larger than asked for stays for the operation that needs it.
      if (best != shelf_->pieces.end() && best->size <= 4 * bytes + 4096) {
        piece found = std::move(*best);
        shelf_->pieces.erase(best);
        shelf_->waiting -= found.size;
        note_use(*shelf_, found.size);
        return {std::move(found), shelf_};
      }
    }
    const source& from = shelf_->from;
    const std::size_t size =
        ((from.dear ? size_class(bytes) : bytes) + alignment - 1) / alignment * alignment;
    block made(piece{{from.allocate(size), from.release}, size}, shelf_);
    std::vector<piece> surplus;  // freed without the lock
    const std::scoped_lock lock(shelf_->mutex);
    note_use(*shelf_, size);
    if (from.dear) surplus = take_surplus(*shelf_);
    return made;
  }

 private:
  // The next power of two, or three quarters of it.
  [[nodiscard]] static std::size_t size_class(std::size_t bytes) noexcept {
    const std::size_t power = std::bit_ceil(bytes);
    return bytes <= power / 4 * 3 ? power / 4 * 3 : power;
  }

  static void note_use(shelf& home, std::size_t bytes) noexcept {
    home.used += bytes;
    home.most_used = std::max(home.most_used, home.used);
  }

  // What waits too much, that for longest first.
  [[nodiscard]] static std::vector<piece> take_surplus(shelf& home) {
    auto end = home.pieces.begin();
    std::size_t left = home.waiting;
    for (; left > 4 * home.most_used && end != home.pieces.end(); ++end) left -= end->size;
    std::vector<piece> surplus(std::move_iterator(home.pieces.begin()), std::move_iterator(end));
    home.pieces.erase(home.pieces.begin(), end);
    home.waiting = left;
    return surplus;
  }

  static void put_back(shelf& home, piece memory) noexcept {
    const std::scoped_lock lock(home.mutex);
    const std::size_t size = memory.size;
    home.used -= size;
    if (!home.from.dear &&
        home.pieces.size() >= home.from.kept) {  // the smallest is the cheapest to make again
      auto smallest = home.pieces.begin();
      for (auto it = home.pieces.begin(); it != home.pieces.end(); ++it)
        if (it->size < smallest->size) smallest = it;
      if (smallest->size < size) {
        home.waiting += size - smallest->size;
        std::swap(*smallest, memory);
      }
      return;
    }
    try {
      home.pieces.push_back(std::move(memory));
      home.waiting += size;
    } catch (const std::bad_alloc&) {  // then it is freed instead of kept
    }
  }

  std::shared_ptr<shelf> shelf_;
};

}  // namespace bluefog
