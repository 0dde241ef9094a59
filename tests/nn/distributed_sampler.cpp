// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>

#include <bluefog/collective/any_of.hpp>
#include <bluefog/collective/broadcast_object.hpp>
#include <bluefog/nn.hpp>

#include "support/ranks.hpp"

namespace nn = bluefog::nn;
using indices = std::vector<std::size_t>;
using bluefog_test::ContainsSubstring;

namespace {

/// Its sample i is i.
struct counting_dataset : torch::data::datasets::BatchDataset<counting_dataset, indices> {
  explicit counting_dataset(std::size_t count) : count_(count) {}
  indices get_batch(c10::ArrayRef<std::size_t> request) override { return request.vec(); }
  std::optional<std::size_t> size() const override { return count_; }

 private:
  std::size_t count_;
};

/// What one rank of several knows, without a backend.
struct fake_group {
  int rank_;
  int size_;
  int rank() const { return rank_; }
  int size() const { return size_; }
};

indices draw(nn::distributed_sampler& sampler, std::size_t batch_size = 3) {
  indices drawn;
  while (const auto batch = sampler.next(batch_size))
    drawn.insert(drawn.end(), batch->begin(), batch->end());
  return drawn;
}

/// The shares of all ranks in `epoch`, by rank.
std::vector<indices> shares(std::size_t count, int ranks, std::size_t epoch,
                            const nn::distributed_sampler_options& options = {}) {
  std::vector<indices> drawn;
  for (int rank = 0; rank < ranks; ++rank) {
    nn::distributed_sampler sampler(count, rank, ranks, options);
    sampler.set_epoch(epoch);
    drawn.push_back(draw(sampler));
    CHECK(drawn.back().size() == sampler.size());
  }
  return drawn;
}

/// All samples of all ranks in ascending order, so that a duplicate shows.
indices sorted_union(const std::vector<indices>& shares) {
  indices all;
  for (const auto& share : shares) all.insert(all.end(), share.begin(), share.end());
  std::sort(all.begin(), all.end());
  return all;
}

indices first_numbers(std::size_t count) {
  indices numbers(count);
  std::iota(numbers.begin(), numbers.end(), std::size_t{0});
  return numbers;
}

}  // namespace

TEST_CASE("the shares of an epoch are disjoint and cover the data set", "[nn][sampler]") {
  const int ranks = GENERATE(1, 2, 3, 4, 7);
  const std::size_t count =
      GENERATE(std::size_t{0}, std::size_t{5}, std::size_t{84}, std::size_t{101});
  const bool shuffle = GENERATE(true, false);
  const auto drawn =
      shares(count, ranks, 3, {.shuffle = shuffle, .remainder = nn::remainder::keep});
  CHECK(sorted_union(drawn) == first_numbers(count));
  for (const auto& share : drawn)  // as even as they can be
    CHECK(share.size() - count / static_cast<std::size_t>(ranks) <= 1);
}

RANKS_TEST(
    "the shares of a communicator's ranks are disjoint, cover the data set and have one length",
    "[nn][sampler]") {
  using bluefog_test::require;
  using bluefog_test::require_equal;
  const auto n = static_cast<std::size_t>(comm.size());
  for (const std::size_t count : {std::size_t{1}, std::size_t{24}, std::size_t{29}})
    for (const auto rest : {nn::remainder::keep, nn::remainder::drop, nn::remainder::pad}) {
      nn::distributed_sampler sampler(count, comm, {.remainder = rest});
      for (const std::size_t epoch : {std::size_t{0}, std::size_t{1}}) {
        sampler.set_epoch(epoch);
        const auto own = draw(sampler);
        std::vector<indices> all;
        for (int root = 0; root < comm.size(); ++root) {
          const auto share = bluefog::broadcast_object(
              comm, std::vector<std::int64_t>(own.begin(), own.end()), root);
          all.emplace_back(share.begin(), share.end());
        }
        const auto together = sorted_union(all);
        const std::set<std::size_t> distinct(together.begin(), together.end());
        if (rest == nn::remainder::keep) {
          require(together == first_numbers(count), "each sample once");
        } else {
          const bool drops = rest == nn::remainder::drop;
          for (const auto& share : all)
            require_equal(share.size(), drops ? count / n : (count + n - 1) / n);
          require_equal(distinct.size(), drops ? count / n * n : count);
        }
      }
    }
}

RANKS_TEST("ranks with shares of different lengths agree on when to stop", "[nn][sampler]") {
  using bluefog_test::require_equal;
  const std::size_t count = 3 * static_cast<std::size_t>(comm.size()) + 1;  // rank 0 has one more
  nn::distributed_sampler sampler(count, comm, {.remainder = nn::remainder::keep});
  require_equal(sampler.size(), std::size_t{comm.rank() == 0 ? 4U : 3U});
  sampler.set_epoch(0);
  int own = 0, rounds = 0;
  for (bool more = true;; ++rounds) {
    more = more && sampler.next(1).has_value();
    if (!bluefog::any_of(comm, more)) break;
    own += more ? 1 : 0;
  }
  require_equal(rounds, 4);
  require_equal(own, comm.rank() == 0 ? 4 : 3);
}

TEST_CASE("dropping gives equal disjoint shares and leaves out less than one sample per rank",
          "[nn][sampler]") {
  const auto drawn = shares(103, 4, 0, {.remainder = nn::remainder::drop});
  for (const auto& share : drawn) CHECK(share.size() == 25);
  const auto all = sorted_union(drawn);
  CHECK(std::set<std::size_t>(all.begin(), all.end()).size() == 100);
  CHECK(all.back() < 103);
}

TEST_CASE("padding gives equal shares that cover the data set", "[nn][sampler]") {
  // 10 samples among 4 ranks are 12 draws; 2 samples among 5 ranks wrap around more than once.
  for (const auto& [count, ranks, each] : {std::tuple{10, 4, 3}, std::tuple{2, 5, 1}}) {
    const auto drawn = shares(static_cast<std::size_t>(count), ranks, 1);
    for (const auto& share : drawn) CHECK(share.size() == static_cast<std::size_t>(each));
    const auto all = sorted_union(drawn);
    CHECK(indices(all.begin(), all.end()).size() == static_cast<std::size_t>(ranks * each));
    const std::set<std::size_t> distinct(all.begin(), all.end());
    CHECK(indices(distinct.begin(), distinct.end()) ==
          first_numbers(static_cast<std::size_t>(count)));
  }
}

TEST_CASE("without shuffling rank r draws r, r + n, r + 2n", "[nn][sampler]") {
  nn::distributed_sampler sampler(8, fake_group{1, 3}, {.shuffle = false});
  CHECK(draw(sampler) == indices{1, 4, 7});
}

TEST_CASE("the order differs between epochs and seeds, and is the same in every run",
          "[nn][sampler]") {
  const auto order = [](std::uint64_t seed, std::size_t epoch) {
    return shares(1000, 1, epoch, {.seed = seed})[0];
  };
  CHECK(order(0, 0) != order(0, 1));
  CHECK(order(0, 1) != order(0, 2));
  CHECK(order(0, 0) != order(0, 2));
  CHECK(order(0, 0) != order(1, 0));
  CHECK(order(0, 1) != order(1, 0));
  CHECK(order(5, 2) == order(5, 2));
  CHECK(order(0, 0) != first_numbers(1000));
}

TEST_CASE("every permutation of three samples is about equally frequent", "[nn][sampler]") {
  std::map<indices, int> frequency;
  for (std::uint64_t epoch = 0; epoch < 6000; ++epoch)
    ++frequency[nn::detail::shuffled_indices(3, 1, epoch)];
  REQUIRE(frequency.size() == 6);
  // 1000 expected each; the standard deviation is 29, and the draws are the same in every run.
  for (const auto& [order, times] : frequency) CHECK(std::abs(times - 1000) < 120);
}

TEST_CASE("set_epoch reaches the sampler inside a data loader", "[nn][sampler]") {
  std::vector<std::vector<indices>> epochs(3, std::vector<indices>(2));
  for (int rank = 0; rank < 2; ++rank) {
    nn::distributed_sampler sampler(40, rank, 2);
    const auto loader = torch::data::make_data_loader(counting_dataset(40), sampler,
                                                      torch::data::DataLoaderOptions(8));
    for (std::size_t epoch = 0; epoch < epochs.size(); ++epoch) {
      sampler.set_epoch(epoch);
      std::size_t batches = 0;
      for (const auto& batch : *loader) {
        auto& share = epochs[epoch][static_cast<std::size_t>(rank)];
        share.insert(share.end(), batch.begin(), batch.end());
        ++batches;
      }
      CHECK(batches == 3);  // 8 + 8 + 4
    }
  }
  for (const auto& ranks : epochs) CHECK(sorted_union(ranks) == first_numbers(40));
  CHECK(epochs[0] != epochs[1]);
  CHECK(epochs[1] != epochs[2]);
  CHECK(epochs[0] != epochs[2]);
}

TEST_CASE("a sampler moved into a loader still hears set_epoch, with a worker thread too",
          "[nn][sampler]") {
  nn::distributed_sampler sampler(30, 0, 1);
  auto& original = sampler;
  const auto loader = torch::data::make_data_loader(counting_dataset(30), std::move(sampler),
                                                    torch::data::DataLoaderOptions(10).workers(1));
  std::vector<indices> epochs(2);
  for (std::size_t epoch = 0; epoch < epochs.size(); ++epoch) {
    original.set_epoch(epoch);
    for (const auto& batch : *loader)
      epochs[epoch].insert(epochs[epoch].end(), batch.begin(), batch.end());
    CHECK(sorted_union({epochs[epoch]}) == first_numbers(30));
  }
  CHECK(epochs[0] != epochs[1]);
}

TEST_CASE("the order does not touch torch's global generator", "[nn][sampler]") {
  const auto before = at::globalContext().defaultGenerator(at::kCPU).get_state();
  shares(100, 2, 1);
  CHECK(at::globalContext().defaultGenerator(at::kCPU).get_state().equal(before));
}

TEST_CASE("start_at leaves out what an interrupted epoch has drawn, once", "[nn][sampler]") {
  nn::distributed_sampler whole(50, 1, 2);
  const auto all = draw(whole, 4);
  nn::distributed_sampler resumed(50, 1, 2);
  resumed.start_at(8);
  resumed.reset();  // what a loader does first
  CHECK(draw(resumed, 4) == indices(all.begin() + 8, all.end()));
  resumed.reset();
  CHECK(draw(resumed, 4) == all);
  CHECK_THROWS_AS(resumed.start_at(26), bluefog::usage_error);
}

TEST_CASE("a saved sampler goes on in the middle of its epoch", "[nn][sampler]") {
  nn::distributed_sampler sampler(50, 0, 2, {.seed = 3});
  sampler.set_epoch(4);
  sampler.next(10);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(file);
  const auto rest = draw(sampler);

  torch::serialize::InputArchive in;
  in.load_from(file);
  nn::distributed_sampler loaded(50, 0, 2, {.seed = 3});
  loaded.load(in);
  CHECK(loaded.epoch() == 4);
  CHECK(loaded.position() == 10);
  loaded.set_epoch(4);  // the training loop names the epoch again
  loaded.reset();
  CHECK(draw(loaded) == rest);

  nn::distributed_sampler other(50, 0, 2, {.seed = 9});
  CHECK_THROWS_WITH(other.load(in), ContainsSubstring("seed must be 9, got 3"));
  nn::distributed_sampler in_order(50, 0, 2, {.shuffle = false, .seed = 3});
  CHECK_THROWS_WITH(in_order.load(in), ContainsSubstring("shuffle must be 0, got 1"));
  CHECK(in_order.epoch() == 0);
  nn::distributed_sampler among_five(50, 0, 5, {.seed = 3});
  CHECK_THROWS_WITH(among_five.load(in), ContainsSubstring("ranks must be 5, got 2"));
}

TEST_CASE("a data set that grew is shared anew", "[nn][sampler]") {
  nn::distributed_sampler sampler(10, 1, 2, {.shuffle = false});
  draw(sampler);
  sampler.reset(14);
  CHECK(draw(sampler) == indices{1, 3, 5, 7, 9, 11, 13});
}

TEST_CASE("a rank outside the group is refused by name", "[nn][sampler]") {
  CHECK_THROWS_WITH(nn::distributed_sampler(10, 3, 3),
                    ContainsSubstring("rank must be in [0, 3), got 3"));
  CHECK_THROWS_AS(nn::distributed_sampler(10, -1, 3), bluefog::usage_error);
  CHECK_THROWS_AS(nn::distributed_sampler(10, 0, 0), bluefog::usage_error);
}

TEST_CASE("any value with rank and size describes a group, a number does not", "[nn][sampler]") {
  STATIC_REQUIRE(nn::ranked<fake_group>);
  STATIC_REQUIRE_FALSE(nn::ranked<int>);
}
