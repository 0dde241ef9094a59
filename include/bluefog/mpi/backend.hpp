// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <mpi.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/unwinding.hpp>
#include <bluefog/mpi/check.hpp>
#include <bluefog/mpi/duplicate.hpp>
#include <bluefog/mpi/exchange.hpp>
#include <bluefog/mpi/handle.hpp>
#include <bluefog/mpi/library.hpp>
#include <bluefog/mpi/mailbox.hpp>
#include <bluefog/mpi/native.hpp>
#include <bluefog/mpi/operation.hpp>
#include <bluefog/mpi/strays.hpp>
#include <bluefog/mpi/threads.hpp>

namespace bluefog {

/// Ranks that are MPI processes.
///
/// Duplicates the communicator that it is given, twice: messages of the program on the same ranks
/// never mix with the library's. Buffers lie in host memory. From `MPI_THREAD_SERIALIZED` on any
/// thread may call any function, except that below `MPI_THREAD_MULTIPLE` a program takes
/// `mpi::library::serialize()` around its own calls to MPI; below `MPI_THREAD_SERIALIZED` only the
/// thread that initialised MPI may call, and a communicator is made with nothing in flight.
/// Initialises MPI if nobody did, see `mpi::library`.
class mpi_backend {
 public:
  using operation_type = mpi::operation;
  static constexpr std::string_view name = "mpi";
  static constexpr memory_space space = memory_space::host;

  /// All ranks that the launcher started. Collective.
  /// \throws usage_error if a launcher started several and MPI sees one; timeout_error as below.
  mpi_backend() : mpi_backend(MPI_COMM_WORLD) {}

  /// The ranks of `group`, which stays the caller's. Collective over `group`.
  /// \param longest_message  bytes after which a message travels in pieces, at most 2^31 - 1.
  /// \throws usage_error if `group` is null or an inter-communicator, or as above; timeout_error if
  ///         some rank does not come in time (`BLUEFOG_TIMEOUT`).
  explicit mpi_backend(MPI_Comm group, std::int64_t longest_message = std::int64_t{1} << 30)
      : mpi_backend(copy_of(group), longest_message) {}

  mpi_backend(mpi_backend&&) noexcept = default;
  mpi_backend& operator=(mpi_backend&& other) noexcept {
    if (this != &other) {
      std::destroy_at(this);  // which decides what becomes of the communicator
      std::construct_at(this, std::move(other));
    }
    return *this;
  }
  mpi_backend(const mpi_backend&) = delete;
  mpi_backend& operator=(const mpi_backend&) = delete;
  ~mpi_backend() {
    if (!group_) return;
    if (marks_ && unwinding_.now()) mpi::library::mark_unwound();
    // MPI uses the identity of a freed communicator again, and what is still on its way would
    // arrive on the next one.
    if (strays_->left_over()) static_cast<void>(group_.release());
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] int machine() const noexcept { return machine_; }
  [[nodiscard]] bool any_thread() const noexcept { return mpi::threads::any(); }

  /// \throws usage_error if the granted thread level does not allow this thread; likewise below.
  [[nodiscard]] mpi::exchange exchange(message_tag tag) {
    mpi::threads::expects_allowed();
    return {group_.get(), tags_, tag, strays_, limit_};
  }

  [[nodiscard]] bool reduces(reduce_op op, dtype type) const noexcept {
    return mpi::native(op, type) != MPI_OP_NULL;
  }

  /// \return whether an allreduce by messages is no slower than `MPI_Iallreduce`: seen on shared
  /// memory and TCP for few ranks, and for long values, which it combines in one pass.
  [[nodiscard]] bool reduces_by_messages(std::size_t bytes) const noexcept {
    constexpr int few = 4;
    constexpr int several = 16;  // beyond, everybody sending to everybody at once crowds a network
    constexpr std::size_t long_bytes = std::size_t{128} << 10;
    return size_ <= few || (size_ <= several && bytes >= long_bytes);
  }

  [[nodiscard]] mpi::operation allreduce(const_buffer in, mutable_buffer out, reduce_op op) {
    const auto size = static_cast<std::int64_t>(size_of(in.type));
    const auto longest = std::max<std::int64_t>(1, limit_ / size);
    return collective(in.count, longest, [=, this](std::int64_t offset, int length, auto* request) {
      const auto target = out.slice(offset, length).data;
      const void* source = in.data == out.data ? MPI_IN_PLACE : in.slice(offset, length).data;
      mpi::check(MPI_Iallreduce(source, target, length, mpi::native(in.type),
                                mpi::native(op, in.type), group_.get(), request),
                 "MPI_Iallreduce");
    });
  }

  [[nodiscard]] mpi::operation broadcast(mutable_buffer values, int root) {
    const auto bytes = static_cast<std::int64_t>(values.bytes());
    return collective(bytes, limit_, [=, this](std::int64_t offset, int length, auto* request) {
      mpi::check(MPI_Ibcast(values.data + offset, length, MPI_BYTE, root, group_.get(), request),
                 "MPI_Ibcast");
    });
  }

  [[nodiscard]] mpi_backend subset(std::span<const int> members, std::uint64_t serial) {
    mpi_backend derived(mailbox_->create(members, serial), limit_, machine_);
    derived.marks_ = false;
    return derived;
  }

  void post(int peer, std::uint64_t number) { mailbox_->post(peer, number); }
  [[nodiscard]] std::optional<letter> collect() { return mailbox_->collect(); }

 private:
  // Takes `group` over. `machine` is found out, collectively, unless it is known.
  mpi_backend(mpi::unique_communicator group, std::int64_t longest_message,
              std::optional<int> machine = std::nullopt)
      : group_(std::move(group)), limit_(longest_message) {
    constexpr std::int64_t most = 0x7FFFFFFF;
    expects(limit_ >= 1 && limit_ <= most, "mpi_backend: longest_message must be in [1, ", most,
            "], got ", limit_);
    mpi::library::clear_marks();
    mailbox_ = std::make_unique<mpi::mailbox>(mpi::duplicate(group_.get()));
    const auto lock = mpi::threads::serialize();
    mpi::check(MPI_Comm_set_errhandler(group_.get(), MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    mpi::check(MPI_Comm_rank(group_.get(), &rank_), "MPI_Comm_rank");
    mpi::check(MPI_Comm_size(group_.get(), &size_), "MPI_Comm_size");
    strays_ = std::make_shared<mpi::strays>(group_.get(), tags_);
    machine_ = machine ? *machine : lowest_rank_sharing_memory();
  }

  static void expect_launched() {
    mpi::library::instance();
    const auto lock = mpi::threads::serialize();
    int size = 0;
    mpi::check(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
    mpi::library::expects_matching_launcher(size);
  }

  // Begins pieces of at most `longest` that make up `total`; at least one, as on the other ranks.
  template <class Begin>
  [[nodiscard]] mpi::operation collective(std::int64_t total, std::int64_t longest, Begin begin) {
    mpi::threads::expects_allowed();
    expects<peer_error>(!strays_->out_of_step(), "mpi_backend: an operation was given up on this ",
                        "communicator, after which MPI might mix up its collective operations; "
                        "go on with a duplicate");
    const auto pieces = std::max<std::int64_t>(1, (total + longest - 1) / longest);
    mpi::operation started(std::vector<mpi::part>(static_cast<std::size_t>(pieces)), strays_);
    started.start([&](std::span<mpi::part> parts) {
      std::int64_t offset = 0;
      for (mpi::part& each : parts) {
        const std::int64_t length = std::min(longest, total - offset);
        begin(offset, static_cast<int>(length), &each.request);
        offset += length;
      }
    });
    return started;
  }

  [[nodiscard]] static mpi::unique_communicator copy_of(MPI_Comm group) {
    expect_launched();
    expects(mpi::threads::any() || mpi::library::operations_in_flight() == 0,
            "mpi_backend: a communicator cannot be made while operations are in flight where MPI "
            "serves one thread only, which makes no progress meanwhile; wait for them first");
    expects(group != MPI_COMM_NULL, "mpi_backend: the communicator is MPI_COMM_NULL");
    {
      const auto lock = mpi::threads::serialize();
      int between_groups = 0;
      mpi::check(MPI_Comm_test_inter(group, &between_groups), "MPI_Comm_test_inter");
      expects(between_groups == 0, "mpi_backend: the communicator is an inter-communicator");
    }
    return mpi::duplicate(group);
  }

  [[nodiscard]] static mpi::tag_space all_tags() {
    void* value = nullptr;
    int found = 0;
    const auto lock = mpi::threads::serialize();
    mpi::check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &value, &found), "MPI_Comm_get_attr");
    return mpi::tag_space(found != 0 ? *static_cast<int*>(value) : 32767);
  }

  [[nodiscard]] int lowest_rank_sharing_memory() const {
    const auto lock = mpi::threads::serialize();
    MPI_Comm shared = MPI_COMM_NULL;
    mpi::check(
        MPI_Comm_split_type(group_.get(), MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &shared),
        "MPI_Comm_split_type");
    const mpi::unique_communicator machine(shared);
    MPI_Group here = MPI_GROUP_NULL;
    mpi::check(MPI_Comm_group(shared, &here), "MPI_Comm_group");
    const mpi::unique_group here_owner(here);
    MPI_Group all = MPI_GROUP_NULL;
    mpi::check(MPI_Comm_group(group_.get(), &all), "MPI_Comm_group");
    const mpi::unique_group all_owner(all);
    const int first = 0;
    int lowest = 0;
    mpi::check(MPI_Group_translate_ranks(here, 1, &first, all, &lowest),
               "MPI_Group_translate_ranks");
    return lowest;
  }

  mpi::unique_communicator group_;
  mpi::tag_space tags_ = all_tags();
  std::int64_t limit_;
  int rank_ = 0;
  int size_ = 1;
  int machine_ = 0;
  std::shared_ptr<mpi::strays> strays_;
  std::unique_ptr<mpi::mailbox> mailbox_;
  detail::unwinding unwinding_;
  // Whether an exception that ends this one may end the job: one made from another may well go down
  // inside the scope of that one.
  bool marks_ = true;
};

static_assert(backend<mpi_backend>);
static_assert(allreducing_backend<mpi_backend>);
static_assert(broadcasting_backend<mpi_backend>);
static_assert(letter_backend<mpi_backend>);

}  // namespace bluefog
