// SPDX-License-Identifier: Apache-2.0
//
// A transport of one's own. What carries the messages here is a table of mailboxes between threads,
// but the three types below are all that a socket, a queue or a simulator has to offer, and then
// every operation, topology and optimizer of the library runs over it. Needs neither MPI nor
// libtorch.
//
//   ./060_own_backend
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <bluefog/collective.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/topology.hpp>

namespace post {

using bluefog::const_buffer;
using bluefog::message_tag;
using bluefog::mutable_buffer;

/// Where letters wait, in order, between two ranks of a group and for one operation.
class office {
 public:
  using address = std::tuple<std::vector<int>, int, int, int, std::uint64_t>;

  void send(const address& to, const_buffer letter) {
    const std::scoped_lock lock(mutex_);
    boxes_[to].emplace_back(letter.data, letter.data + letter.bytes());
  }

  /// \return whether a letter was there. Throws if it has another length than is expected.
  bool receive(const address& from, mutable_buffer out) {
    const std::scoped_lock lock(mutex_);
    const auto box = boxes_.find(from);
    if (box == boxes_.end()) return false;
    const auto letter = std::move(box->second.front());
    box->second.erase(box->second.begin());
    if (box->second.empty()) boxes_.erase(box);
    bluefog::expects<bluefog::mismatch_error>(letter.size() == out.bytes(), "a letter of ",
                                              letter.size(), " bytes, expected ", out.bytes());
    if (!letter.empty()) std::memcpy(out.data, letter.data(), letter.size());
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<address, std::vector<std::vector<std::byte>>> boxes_;
};

/// Letters that are still to come. What is sent is copied, so sending is over at once.
class operation {
 public:
  struct expected {
    office::address from;
    mutable_buffer out;
    int sender;
  };

  operation() = default;
  operation(std::shared_ptr<office> mail, std::vector<expected> letters)
      : mail_(std::move(mail)), letters_(std::move(letters)) {}

  bool ready() {  // in order: letters between two ranks must not overtake each other
    while (!letters_.empty() && mail_->receive(letters_.front().from, letters_.front().out))
      letters_.erase(letters_.begin());
    return letters_.empty();
  }
  void abandon() noexcept { letters_.clear(); }
  std::vector<int> waiting_for() const {
    return letters_.empty() ? std::vector<int>{} : std::vector{letters_.front().sender};
  }

 private:
  std::shared_ptr<office> mail_;
  std::vector<expected> letters_;
};

/// Collects sends and receives, and starts them together.
class exchange {
 public:
  exchange(std::shared_ptr<office> mail, const std::vector<int>& group, int rank, message_tag tag)
      : mail_(std::move(mail)), group_(group), rank_(rank), tag_(tag) {}

  void send(const_buffer in, int peer) { sends_.emplace_back(between(rank_, peer), in); }
  void receive(mutable_buffer out, int peer) {
    receives_.push_back({between(peer, rank_), out, peer});
  }
  operation submit() && {
    for (const auto& [to, letter] : sends_) mail_->send(to, letter);
    return {std::move(mail_), std::move(receives_)};
  }

 private:
  office::address between(int sender, int receiver) const {
    return {group_, sender, receiver, static_cast<int>(tag_.kind), tag_.number};
  }

  std::shared_ptr<office> mail_;
  const std::vector<int>& group_;
  int rank_;
  message_tag tag_;
  std::vector<std::pair<office::address, const_buffer>> sends_;
  std::vector<operation::expected> receives_;
};

/// The backend: one rank's way to the office.
class backend {
 public:
  using operation_type = operation;
  static constexpr std::string_view name = "post";
  static constexpr bluefog::memory_space space = bluefog::memory_space::host;

  /// \param group  tells this group's letters from those of others; as many numbers as ranks.
  backend(std::shared_ptr<office> mail, std::vector<int> group, int rank)
      : mail_(std::move(mail)), group_(std::move(group)), rank_(rank) {}
  backend(backend&&) = default;
  backend& operator=(backend&&) = default;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(group_.size()) - 1; }
  int machine() const noexcept { return 0; }
  bool any_thread() const noexcept { return true; }

  post::exchange exchange(message_tag tag) { return {mail_, group_, rank_, tag}; }

  backend subset(std::span<const int> members, std::uint64_t serial) {
    std::vector<int> group(members.begin(), members.end());
    for (int& member : group) member = group_[static_cast<std::size_t>(member)];
    int place = 0;
    while (members[static_cast<std::size_t>(place)] != rank_) ++place;
    group.push_back(group_.back() * 1000 + static_cast<int>(serial) + 1);  // who, and which time
    return {mail_, std::move(group), place};
  }

 private:
  std::shared_ptr<office> mail_;
  std::vector<int> group_;  // the ranks as the first group numbers them, and the group's own number
  int rank_;
};

static_assert(bluefog::backend<backend>);

}  // namespace post

int main() {
  constexpr int ranks = 4;
  const auto mail = std::make_shared<post::office>();
  const auto run = [&](int rank) {
    bluefog::communicator comm(post::backend(mail, {0, 1, 2, 3, 0}, rank));
    std::vector<double> x{static_cast<double>(rank)};
    bluefog::neighbor_allreduce(comm, x, x, bluefog::topology::ring(ranks));
    const auto mixed = bluefog::allgather(comm, x);

    auto half = comm.split(rank % 2);
    std::vector<double> sum{static_cast<double>(rank)};
    bluefog::allreduce_nonblocking(half, sum, sum, bluefog::reduce_op::sum).wait();
    const auto sums = bluefog::allgather(comm, sum);

    if (rank != 0) return;
    for (int other = 0; other < ranks; ++other)
      std::printf("rank %d: average with neighbors %.4f, sum of its half %.0f\n", other,
                  mixed[static_cast<std::size_t>(other)], sums[static_cast<std::size_t>(other)]);
  };
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
}

// Expected output:
// rank 0: average with neighbors 1.3333, sum of its half 2
// rank 1: average with neighbors 1.0000, sum of its half 4
// rank 2: average with neighbors 2.0000, sum of its half 2
// rank 3: average with neighbors 1.6667, sum of its half 4
