// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <torch/data/samplers/base.h>
#include <torch/serialize/archive.h>

#include <bluefog/core/error.hpp>

namespace bluefog::nn {

/// What happens to the samples that are left over when the ranks cannot share them evenly.
enum class remainder {
  pad,   ///< equal shares; the first samples of the order are drawn a second time
  drop,  ///< equal shares; the last samples of the order are left out in this epoch
  keep,  ///< every sample exactly once; some ranks draw one more than others
};

/// How a `distributed_sampler` orders and divides the samples; the same on every rank.
struct distributed_sampler_options {
  bool shuffle = true;     ///< a new order in each epoch, else 0, 1, 2, ...
  std::uint64_t seed = 0;  ///< of the shuffled orders
  nn::remainder remainder =
      nn::remainder::pad;  ///< `pad` and `drop`: all ranks take equally many steps
};

/// Anything that knows which of how many ranks it is, such as a communicator.
template <class T>
concept ranked = requires(const T& group) {
  { group.rank() } -> std::convertible_to<int>;
  { group.size() } -> std::convertible_to<int>;
};

namespace detail {

/// Shuffles by Fisher and Yates's method. Unlike `std::shuffle`, the same on every platform.
inline void shuffle(std::span<std::size_t> values, std::mt19937_64& generator) {
  for (std::size_t i = values.size(); i > 1; --i) {
    const std::uint64_t bound = i;
    const std::uint64_t biased = (std::numeric_limits<std::uint64_t>::max() - bound + 1) % bound;
    std::uint64_t draw = generator();
    while (draw < biased) draw = generator();  // what remains is a whole multiple of bound
    std::swap(values[i - 1], values[draw % bound]);
  }
}

/// \return 0, ..., size - 1 in the order of `epoch`, a function of the arguments alone.
inline std::vector<std::size_t> shuffled_indices(std::size_t size, std::uint64_t seed,
                                                 std::uint64_t epoch) {
  std::vector<std::size_t> order(size);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::seed_seq words{seed & 0xFFFFFFFFU, seed >> 32U, epoch & 0xFFFFFFFFU, epoch >> 32U};
  std::mt19937_64 generator(words);
  shuffle(order, generator);
  return order;
}

}  // namespace detail

/// Draws this rank's share of a data set's indices, in an order that changes with the epoch.
///
/// All ranks see one order of the whole set, and rank r takes its entries r, r + n, r + 2n, ... .
/// The shares of an epoch are thus disjoint, and cover the set but for what `remainder` says. The
/// order depends on (seed, epoch) alone: neither on torch's global generator, nor on the platform.
///
/// A copy is the same sampler, position included. `torch::data::make_data_loader` keeps a copy, so
/// `set_epoch` on the user's own object is what the loader's next `begin()` follows:
///
///     bluefog::nn::distributed_sampler sampler(size, comm, {.seed = 7});
///     auto loader = torch::data::make_data_loader(std::move(dataset), sampler, batch_size);
///     for (std::size_t epoch = 0; epoch < 10; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) ...
///     }
///
/// Needs no communication. Not thread safe: one loader at a time.
class distributed_sampler : public torch::data::samplers::Sampler<> {
 public:
  /// \param dataset_size  number of samples in the whole data set, the same on every rank.
  /// \param rank          whose share to draw, in [0, ranks).
  /// \param ranks         among how many the set is divided.
  /// \throws usage_error if `rank` is out of range.
  distributed_sampler(std::size_t dataset_size, int rank, int ranks,
                      const distributed_sampler_options& options = {})
      : state_(std::make_shared<state>()) {
    expects(ranks >= 1, "distributed_sampler: there must be at least one rank, got ", ranks);
    expects(rank >= 0 && rank < ranks, "distributed_sampler: rank must be in [0, ", ranks,
            "), got ", rank);
    *state_ = {.dataset_size = dataset_size,
               .rank = static_cast<std::size_t>(rank),
               .ranks = static_cast<std::size_t>(ranks),
               .options = options};
  }

  /// The share of `group.rank()` among `group.size()`.
  template <ranked Group>
  distributed_sampler(std::size_t dataset_size, const Group& group,
                      const distributed_sampler_options& options = {})
      : distributed_sampler(dataset_size, group.rank(), group.size(), options) {}

  // Not movable: whoever moves it into a loader can still call set_epoch on the original.
  distributed_sampler(const distributed_sampler&) = default;
  distributed_sampler& operator=(const distributed_sampler&) = default;
  ~distributed_sampler() override = default;

  /// \return how many indices this rank draws in an epoch.
  [[nodiscard]] std::size_t size() const noexcept {
    const std::size_t even = state_->dataset_size / state_->ranks;
    const std::size_t rest = state_->dataset_size % state_->ranks;
    switch (state_->options.remainder) {
      case remainder::pad: return even + (rest != 0 ? 1 : 0);
      case remainder::drop: return even;
      case remainder::keep: break;
    }
    return even + (state_->rank < rest ? 1 : 0);
  }

  /// \return the epoch whose order is drawn.
  [[nodiscard]] std::size_t epoch() const noexcept { return state_->epoch; }

  /// \return how many indices of this epoch have been drawn. A loader's workers draw ahead.
  [[nodiscard]] std::size_t position() const noexcept { return state_->position; }

  /// Goes to the start of `epoch`; the present one keeps its position. The same on every rank.
  void set_epoch(std::size_t epoch) {
    if (epoch == state_->epoch) return;
    state_->epoch = epoch;
    state_->order.reset();
    start_at(0);
  }

  /// Leaves out the first `position` indices of this rank's share of the present epoch, once, to
  /// go on after an interruption: `sampler.start_at(finished_batches * batch_size)`.
  ///
  /// \throws usage_error if `position` is beyond `size()`.
  void start_at(std::size_t position) {
    expects(position <= size(), "distributed_sampler::start_at: position must not exceed ", size(),
            ", got ", position);
    state_->start = position;
    state_->position = position;
  }

  /// Starts the present epoch over, or where `start_at` or `load` said. Each loader's `begin()`
  /// does.
  ///
  /// \param new_size  of the whole data set, if it has changed.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override {
    if (new_size && *new_size != state_->dataset_size) {
      state_->dataset_size = *new_size;
      state_->order.reset();
      state_->start = 0;
    }
    state_->position = std::exchange(state_->start, 0);
  }

  /// \return up to `batch_size` indices, nothing at the end of the epoch.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    const std::size_t count = std::min(batch_size, size() - state_->position);
    if (count == 0) return std::nullopt;
    if (!state_->order) state_->order = share();
    const auto first = state_->order->begin() + static_cast<std::ptrdiff_t>(state_->position);
    state_->position += count;
    return std::vector<std::size_t>(first, first + static_cast<std::ptrdiff_t>(count));
  }

  /// Writes epoch and position, and what they depend on.
  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("epoch", as_ivalue(state_->epoch));
    archive.write("position", as_ivalue(state_->position));
    archive.write("dataset_size", as_ivalue(state_->dataset_size));
    archive.write("ranks", as_ivalue(state_->ranks));
    archive.write("shuffle", as_ivalue(state_->options.shuffle ? 1 : 0));
    archive.write("seed", as_ivalue(state_->options.seed));
  }

  /// Goes on where the saved sampler was.
  ///
  /// \throws usage_error if that one had another data set size, number of ranks, `shuffle` or seed,
  ///         for which its position means nothing here. This sampler is then unchanged.
  void load(torch::serialize::InputArchive& archive) override {
    const auto read = [&archive](const std::string& key) {
      c10::IValue value;
      archive.read(key, value);
      return static_cast<std::uint64_t>(value.toInt());
    };
    const auto expect_same = [&read](const std::string& key, std::uint64_t ours) {
      const std::uint64_t saved = read(key);
      expects(saved == ours, "distributed_sampler::load: ", key, " must be ", ours, ", got ",
              saved);
    };
    expect_same("dataset_size", state_->dataset_size);
    expect_same("ranks", state_->ranks);
    expect_same("shuffle", state_->options.shuffle ? 1 : 0);
    expect_same("seed", state_->options.seed);
    const std::size_t epoch = read("epoch");
    const std::size_t position = read("position");
    expects(position <= size(), "distributed_sampler::load: position must not exceed ", size(),
            ", got ", position);
    set_epoch(epoch);
    start_at(position);
  }

 private:
  struct state {
    std::size_t dataset_size = 0;
    std::size_t rank = 0;
    std::size_t ranks = 1;
    distributed_sampler_options options = {};
    std::size_t epoch = 0;
    std::size_t start = 0;  // where the next reset() goes
    std::size_t position = 0;
    std::optional<std::vector<std::size_t>> order =
        {};  // this rank's share, made when first needed
  };

  static c10::IValue as_ivalue(std::uint64_t value) {
    return c10::IValue(static_cast<std::int64_t>(value));
  }

  [[nodiscard]] std::vector<std::size_t> share() const {
    const state& s = *state_;
    std::vector<std::size_t> order;
    if (s.options.shuffle)
      order = detail::shuffled_indices(s.dataset_size, s.options.seed, s.epoch);
    std::vector<std::size_t> mine(size());
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const std::size_t entry = (s.rank + i * s.ranks) % s.dataset_size;  // wraps around if padded
      mine[i] = s.options.shuffle ? order[entry] : entry;
    }
    return mine;
  }

  std::shared_ptr<state> state_;  // shared by all copies, one of which the loader keeps
};

}  // namespace bluefog::nn
