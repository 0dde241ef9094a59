// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include <bluefog/thread.hpp>

#include "support/ranks.hpp"

using namespace bluefog;
using bluefog_test::require_throws;

namespace {

[[nodiscard]] message_tag tag(std::uint64_t number, std::uint64_t oldest = 0,
                              channel lane = channel::group) {
  return {lane, number, oldest};
}

struct two_ranks {
  std::shared_ptr<threads::fabric> group = std::make_shared<threads::fabric>(3);
  std::vector<thread_backend> ranks = [this] {
    std::vector<thread_backend> made;
    for (int rank = 0; rank < 3; ++rank) made.emplace_back(group, rank);
    return made;
  }();

  [[nodiscard]] threads::operation send(int from, int to, const std::vector<int>& values,
                                        message_tag number) {
    auto exchange = ranks[static_cast<std::size_t>(from)].exchange(number);
    exchange.send(as_buffer(values), to);
    return std::move(exchange).submit();
  }
  [[nodiscard]] threads::operation receive(int at, int from, std::vector<int>& values,
                                           message_tag number) {
    auto exchange = ranks[static_cast<std::size_t>(at)].exchange(number);
    exchange.receive(as_mutable_buffer(values), from);
    return std::move(exchange).submit();
  }
};

}  // namespace

TEST_CASE("messages meet by number, whichever half comes first", "[thread][fabric]") {
  two_ranks pair;
  const std::vector<int> seven{7}, eight{8};
  std::vector<int> a(1), b(1);
  auto late = pair.receive(1, 0, a, tag(8));
  auto sent7 = pair.send(0, 1, seven, tag(7));
  CHECK_FALSE(late.ready());
  auto sent8 = pair.send(0, 1, eight, tag(8));
  auto early = pair.receive(1, 0, b, tag(7));
  CHECK((late.ready() && early.ready() && sent7.ready() && sent8.ready()));
  CHECK((a[0] == 8 && b[0] == 7));
}

TEST_CASE("operations of two ranks do not meet those of all", "[thread][fabric]") {
  two_ranks pair;
  const std::vector<int> one{1}, two{2};
  std::vector<int> a(1), b(1);
  auto sent = pair.send(0, 1, one, tag(5));
  auto sent_pair = pair.send(0, 1, two, tag(5, 0, channel::pair));
  auto got_pair = pair.receive(1, 0, a, tag(5, 0, channel::pair));
  auto got = pair.receive(1, 0, b, tag(5));
  CHECK((got.ready() && got_pair.ready() && sent.ready() && sent_pair.ready()));
  CHECK((a[0] == 2 && b[0] == 1));
}

TEST_CASE("a message of another length is an error with both lengths, and no data",
          "[thread][fabric]") {
  two_ranks pair;
  const std::vector<int> three{1, 2, 3};
  std::vector<int> two{-1, -1};
  auto sent = pair.send(0, 1, three, tag(1));
  auto got = pair.receive(1, 0, two, tag(1));
  CHECK(require_throws<mismatch_error>([&] { static_cast<void>(got.ready()); }) ==
        "rank 0 sent 12 bytes where rank 1 expects 8");
  CHECK(two == std::vector<int>{-1, -1});
  CHECK(got.ready());
  CHECK(sent.ready());
}

TEST_CASE("given-up messages touch no memory, and tell those who wait for them",
          "[thread][fabric]") {
  two_ranks pair;
  std::vector<int> at1(1, -1), at2(1, -1);
  const std::vector<int> one{1};
  auto waiting = pair.receive(1, 0, at1, tag(3));
  {
    std::vector<int> own(1);
    auto all = pair.ranks[0].exchange(tag(3));
    all.receive(as_mutable_buffer(own), 1);
    all.receive(as_mutable_buffer(own), 2);
    auto abandoned = std::move(all).submit();
    abandoned.abandon();
    CHECK(abandoned.ready());
  }
  CHECK(require_throws<peer_error>([&] { static_cast<void>(waiting.ready()); }) ==
        "rank 0 gave it up");
  auto late = pair.receive(2, 0, at2, tag(3));
  CHECK_THROWS_AS(late.ready(), peer_error);
  auto unheard = pair.send(2, 0, one, tag(3));  // whose memory is gone
  CHECK(unheard.ready());
  CHECK((at1[0] == -1 && at2[0] == -1));
}

TEST_CASE("a failure takes the operation's other messages back, and says why to their peers",
          "[thread][fabric]") {
  two_ranks pair;
  std::vector<int> from0(1), from1(1), at2(1);
  const std::vector<int> one{1};
  auto exchange = pair.ranks[1].exchange(tag(4));
  exchange.receive(as_mutable_buffer(from0), 0);
  exchange.receive(as_mutable_buffer(from1), 2);
  exchange.send(as_buffer(one), 2);
  auto whole = std::move(exchange).submit();
  CHECK_FALSE(whole.ready());
  CHECK(whole.waiting_for() == std::vector<int>{0, 2});
  pair.group->leave(0);
  CHECK(require_throws<peer_error>([&] { static_cast<void>(whole.ready()); }) ==
        "rank 0 has ended");
  auto third = pair.receive(2, 1, at2, tag(4));
  CHECK(require_throws<peer_error>([&] { static_cast<void>(third.ready()); }) ==
        "rank 1 gave it up: rank 0 has ended");
}

TEST_CASE("a receive that its sender has passed fails", "[thread][fabric]") {
  two_ranks pair;
  std::vector<int> x(1);
  const std::vector<int> one{1};
  auto waiting = pair.receive(1, 0, x, tag(3));
  auto sent = pair.send(0, 1, one, tag(4, 4));
  CHECK_THROWS_AS(waiting.ready(), mismatch_error);
  auto got = pair.receive(1, 0, x, tag(4, 4));
  CHECK((got.ready() && sent.ready() && x[0] == 1));
}

TEST_CASE("giving up while the message arrives never tears it", "[thread][fabric]") {
  for (int round = 0; round < 300; ++round) {
    two_ranks pair;
    const std::vector<int> values(5000, round);
    auto target = std::make_unique<std::vector<int>>(5000, -1);
    std::atomic<bool> go = false;
    std::jthread sender([&] {
      while (!go) std::this_thread::yield();
      auto sent = pair.send(0, 1, values, tag(1));
      while (!sent.ready()) std::this_thread::yield();
    });
    auto got = pair.receive(1, 0, *target, tag(1));
    go = true;
    for (int i = 0; i < round % 50 * 20; ++i) static_cast<void>(pair.ranks[1].rank());
    got.abandon();
    const int first = target->front();
    CHECK((first == -1 || first == round));
    CHECK(*target == std::vector<int>(5000, first));
    target.reset();  // nobody may write any more
  }
}

TEST_CASE("letters arrive in order and beside messages", "[thread][fabric]") {
  two_ranks pair;
  CHECK_FALSE(pair.ranks[1].collect());
  pair.ranks[0].post(1, 5);
  pair.ranks[2].post(1, 6);
  const auto first = pair.ranks[1].collect();
  const auto second = pair.ranks[1].collect();
  REQUIRE((first && second));
  CHECK((first->sender == 0 && first->number == 5 && second->sender == 2 && second->number == 6));
  CHECK_FALSE(pair.ranks[0].collect());
}
