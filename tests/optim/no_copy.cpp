// SPDX-License-Identifier: Apache-2.0
// What the averaging optimizers hand over to be sent, and when: the parameters where they are, and
// the first of them while others are still to be adapted.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology/ring.hpp>

#include "backend/support.hpp"
#include "simulation.hpp"
#include "support/recording_backend.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using torch::optim::SGD;

bool holds(const outbox::message& it, const at::Tensor& parameter) {
  const auto* const begin = static_cast<const std::byte*>(parameter.data_ptr());
  return it.begin <= begin && begin + parameter.nbytes() <= it.begin + it.bytes;
}

/// Requires of what was sent in `rounds` communications over a ring that it lies in the parameters'
/// memory, in as many messages per neighbour as there are buckets.
template <class Comm>
void require_in_place(const Comm& comm, outbox& sent, const mlp& net, std::int64_t rounds,
                      std::int64_t buckets) {
  const auto messages = sent.take();
  const auto parameters = net->parameters();
  const auto begin_of = [](const at::Tensor& each) {
    return static_cast<const std::byte*>(each.data_ptr());
  };
  const std::byte* low = begin_of(parameters.front());
  const std::byte* high = low;
  for (const auto& each : parameters) {
    low = std::min(low, begin_of(each));
    high = std::max(high, begin_of(each) + each.nbytes());
  }
  for (const auto& each : messages)
    require(low <= each.begin && each.begin + each.bytes <= high, "a copy was sent");
  for (const int step : {-1, 1}) {
    const int peer = (comm.rank() + comm.size() + step) % comm.size();
    if (peer == comm.rank()) continue;
    require_equal(std::ranges::count(messages, peer, &outbox::message::peer), rounds * buckets);
    for (const auto& each : parameters) {
      const auto brings = [&](const outbox::message& it) {
        return it.peer == peer && holds(it, each);
      };
      require_equal(std::ranges::count_if(messages, brings), rounds);
    }
  }
}

template <class Comm>
void send_in_place(Comm& comm, outbox& sent) {
  struct packing {
    std::int64_t bytes;
    std::int64_t buckets;
  };
  // The parameters have 640, 128, 2048, 128, 256 and 16 bytes.
  for (const auto& [bytes, buckets] : {packing{25 << 20, 1}, packing{700, 4}, packing{1, 6}}) {
    const topology::ring ring(comm.size());
    const auto train = [&](auto& optimizer, mlp& net) {
      static_cast<void>(sent.take());  // from its construction
      for (int step = 0; step < 3; ++step) train_by_forward(optimizer, net, comm.rank(), step);
      return optimizer.round();
    };
    for (const optim::start when : all_starts) {
      mlp net = make_mlp(comm.rank());
      std::int64_t rounds = 0;
      {
        optim::adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm, ring,
                                            {.start = when, .bucket_bytes = bytes});
        rounds = train(optimizer, net);
      }  // what is on its way arrives
      require_in_place(comm, sent, net, rounds, buckets);
    }
    mlp net = make_mlp(comm.rank());
    optim::adapt_then_combine optimizer(SGD(net->parameters(), 0.1), net, comm, ring,
                                        {.bucket_bytes = bytes});
    const auto rounds = train(optimizer, net);
    require_equal(rounds, std::int64_t{3});
    require_in_place(comm, sent, net, rounds, buckets);
  }
}

/// What a rank sends, and its parameters at that moment.
struct sight {
  outbox::message sent;
  std::vector<at::Tensor> parameters;
};

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const auto& each : tensors) copies.push_back(each.detach().clone());
  return copies;
}

/// Requires that a step sends the first parameters first, and that at each message those are
/// adapted which one has held by then, and the others as they were.
template <class Comm>
void send_what_is_adapted(Comm& comm, mlp& net, std::vector<sight>& seen, std::int64_t bytes) {
  optim::adapt_then_combine optimizer(SGD(net->parameters(), 0.5), net, comm,
                                      topology::ring(comm.size()), {.bucket_bytes = bytes});
  const auto parameters = net->parameters();
  const auto before = copies_of(parameters);
  seen.clear();  // from its construction
  train_by_forward(optimizer, net, comm.rank(), 0);

  require(!seen.empty() && holds(seen.front().sent, parameters.front()), "the first goes first");
  require(!holds(seen.front().sent, parameters.back()), "the last one goes later");
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor adapted = before[i] - 0.5 * parameters[i].grad();
    require(!adapted.equal(before[i]), "there is something to learn");
    bool sent = false;
    for (const sight& each : seen) {
      sent = sent || holds(each.sent, parameters[i]);
      if (sent)
        require_close(each.parameters[i], adapted, 1e-12);
      else
        require_same(each.parameters[i], before[i]);
    }
    require(sent, "a parameter stays at home");
  }
}

}  // namespace

TEST_CASE("the first parameters are sent while the others are still to be adapted",
          "[optim][arena][thread]") {
  for (const int ranks : {2, 3})
    for (const std::int64_t bytes : {700, 1}) {
      struct witness {
        mlp net;
        std::vector<sight> seen;
        outbox sent;
      };
      std::vector<witness> witnesses(static_cast<std::size_t>(ranks));
      const auto of = [&](int rank) -> witness& {
        return witnesses[static_cast<std::size_t>(rank)];
      };
      const auto failures = run_wrapped(
          ranks,
          [&](thread_backend inner) {
            witness& own = of(inner.rank());
            own.net = make_mlp(inner.rank());
            own.sent.watch([&own](const outbox::message& it) {
              own.seen.push_back({it, copies_of(own.net->parameters())});
            });
            return recording_backend<thread_backend>(std::move(inner), own.sent);
          },
          [&](auto& comm) {
            witness& own = of(comm.rank());
            send_what_is_adapted(comm, own.net, own.seen, bytes);
          },
          {.check = false});
      CHECK(first_text(failures) == "");
    }
}
TEST_CASE("parameters are sent from where they are, in one message per bucket (threads)",
          "[optim][arena][thread]") {
  for (const int ranks : {1, 2, 3, 4}) {
    std::vector<outbox> sent(static_cast<std::size_t>(ranks));
    const auto of = [&](int rank) -> outbox& { return sent[static_cast<std::size_t>(rank)]; };
    const auto failures = run_wrapped(
        ranks,
        [&](thread_backend inner) {
          outbox& own = of(inner.rank());
          return recording_backend<thread_backend>(std::move(inner), own);
        },
        [&](auto& comm) { send_in_place(comm, of(comm.rank())); });
    CHECK(first_text(failures) == "");
  }
}
#ifdef BLUEFOG_TEST_MPI
TEST_CASE("parameters are sent from where they are, in one message per bucket (MPI)",
          "[optim][arena][mpi]") {
  on_mpi([](auto&) {
    outbox sent;
    communicator comm(recording_backend<mpi_backend>(mpi_backend(), sent));
    send_in_place(comm, sent);
  });
}
#endif
