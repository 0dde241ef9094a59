// SPDX-License-Identifier: Apache-2.0
// When the optimizers communicate, with whom, and what that costs.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/optim/gradient_allreduce.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/topology.hpp>

#include "simulation.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using optim::adapt_then_combine;
using optim::adapt_with_combine;
using optim::communication_type;
using optim::gradient_allreduce;
using torch::optim::SGD;

constexpr std::int64_t one_model = (5 * 16 + 16 + 16 * 16 + 16 + 2 * 16 + 2) * 8;  // bytes

/// Plays a sequence: F a forward with its backward, S a step that has to communicate, s one that
/// must not. A step is followed by zero_grad.
template <class Optimizer, class Comm>
void play(Optimizer& optimizer, mlp& net, Comm& comm, std::string_view sequence, bool by_forward) {
  int seed = 0;
  for (const char each : sequence) {
    if (each == 'F') {
      const auto input = values({4, 5}, ++seed + comm.rank());
      loss_of(by_forward ? optimizer.forward(net, input) : net->forward(input), seed).backward();
    } else if (each == 'S' || each == 's') {
      const auto sent = comm.statistics();
      optimizer.step();
      optimizer.zero_grad();
      if (each == 's') {
        require_equal(comm.statistics().bytes_sent, sent.bytes_sent);
        require_equal(comm.statistics().operations, sent.operations);
        require_equal(comm.statistics().control_messages, sent.control_messages);
        require(optimizer.passes_since_communication() > 0, "a local step keeps the count");
      } else {
        require_equal(optimizer.passes_since_communication(), 0);
      }
    }
  }
}

/// The six programs of which steps communicate is known for J = 3, and what is known.
struct known {
  std::string_view program;
  int warnings;
};
constexpr known with_three[] = {{"FFFS", 0},  {"FsFsFS", 0}, {"FFsFS", 0},
                                {"FsFFS", 0}, {"FFFFS", 1},  {"FFsFFS", 1}};

/// The program with the steps that communicate written as S, by the rule; and whether it warns.
std::pair<std::string, int> by_rule(std::string_view program, int passes) {
  std::string steps;
  int since = 0, warnings = 0;
  for (const char each : program) {
    if (each == 'F') {
      if (since >= passes) warnings = 1;  // once per optimizer
      ++since;
      steps += 'F';
    } else {
      steps += since >= passes ? 'S' : 's';
      if (since >= passes) since = 0;
    }
  }
  return {steps, warnings};
}

/// What a wrapper counts, and what the option is called.
struct wrapper {
  std::string_view counts;
  std::string_view option;
  bool by_forward;
};
constexpr wrapper wrappers[] = {{"forwards", "num_steps_per_communication", true},
                                {"backwards", "num_steps_per_communication", false},
                                {"backwards", "backward_passes_per_step", true},
                                {"backwards", "backward_passes_per_step", true}};
constexpr int kinds = 4;

/// Calls `act(optimizer)` with a wrapper of this kind around SGD with momentum.
template <class Model, class Comm, class Act>
void with_wrapper(int kind, Model& net, Comm& comm, int passes, const Act& act,
                  std::vector<at::Tensor> parameters = {}) {
  if (parameters.empty()) parameters = net->parameters();
  SGD sgd(parameters, torch::optim::SGDOptions(0.1).momentum(0.5));
  if (kind < 2) {
    adapt_with_combine optimizer(std::move(sgd), net, comm,
                                 {.num_steps_per_communication = passes});
    act(optimizer);
  } else if (kind == 2) {
    adapt_then_combine optimizer(std::move(sgd), net, comm, {.backward_passes_per_step = passes});
    act(optimizer);
  } else {
    gradient_allreduce optimizer(std::move(sgd), net, comm, {.backward_passes_per_step = passes});
    act(optimizer);
  }
}

}  // namespace

TEST_CASE("which steps of six programs communicate is what is known for three passes",
          "[optim][counting]") {
  for (const auto& [program, warnings] : with_three)
    CHECK(by_rule(program, 3) == std::pair(std::string(program), warnings));
}

RANKS_TEST("every wrapper communicates where a window ends, and warns once where one is overrun",
           "[optim][counting]") {
  if (comm.size() > 4) return;  // long enough
  for (const auto& each : with_three)
    for (const int passes : {1, 2, 3, 4})
      for (int kind = 0; kind < kinds; ++kind) {
        const auto [program, warnings] = by_rule(concat(each.program, each.program), passes);
        const std::string_view played = program;
        captured_log log;
        mlp net = make_mlp(0);
        with_wrapper(kind, net, comm, passes, [&](auto& optimizer) {
          const auto before = comm.statistics().bytes_sent;
          play(optimizer, net, comm, played, wrappers[kind].by_forward);
          const auto sent = comm.statistics().bytes_sent - before;
          const auto communications = std::ranges::count(played, 'S');
          if constexpr (requires { optimizer.round(); }) {
            require_equal(optimizer.round(), std::int64_t{communications});
            require_equal(sent, comm.size() == 1 ? 0 : communications * one_model);
          } else {
            require((sent > 0) == (communications > 0 && comm.size() > 1), "only S sends");
            if (played.back() == 'S')
              require_close(allreduce(comm, flatten(*net)), flatten(*net), 1e-12);
          }
        });
        require_equal(log.count(""), warnings);
        require_equal(log.count(wrappers[kind].counts), warnings);
        require_equal(log.count(concat(wrappers[kind].option, " is ", passes)), warnings);
        require_equal(log.count(concat("a step() has to follow every ", passes)), warnings);
      }
}

RANKS_TEST("the warning comes with the pass that is one too many, not with the step after it",
           "[optim][counting]") {
  if (comm.size() > 4) return;  // long enough
  for (const std::string_view program : {"FFFFS", "FFsFFS"})
    for (int kind = 0; kind < kinds; ++kind) {
      captured_log log;
      mlp net = make_mlp(0);
      with_wrapper(kind, net, comm, 3, [&](auto& optimizer) {
        int forwards = 0;
        for (const char& each : program) {
          play(optimizer, net, comm, std::string_view(&each, 1), wrappers[kind].by_forward);
          if (each == 'F') ++forwards;
          require_equal(log.count("a step() has to follow every 3"), forwards < 4 ? 0 : 1);
        }
      });
    }
}

RANKS_TEST("epochs that are no multiple of the window shift it, or end it", "[optim][counting]") {
  captured_log log;
  for (int kind = 0; kind < kinds; ++kind) {
    const bool by_forward = wrappers[kind].by_forward;
    mlp net = make_mlp(0);
    with_wrapper(kind, net, comm, 3, [&](auto& optimizer) {  // four batches per epoch
      play(optimizer, net, comm, "FsFsFSFs", by_forward);
      require_equal(optimizer.passes_since_communication(), 1);
      play(optimizer, net, comm, "FsFSFsFs", by_forward);
      require_equal(optimizer.passes_since_communication(), 2);
      play(optimizer, net, comm, "FSFsFsFS", by_forward);
      require_equal(optimizer.passes_since_communication(), 0);
      for (int epoch = 0; epoch < 2; ++epoch) {
        play(optimizer, net, comm, "FsFsFSFs", by_forward);
        optimizer.reset_passes();
        require_equal(optimizer.passes_since_communication(), 0);
      }
      for (int epoch = 0; epoch < 2; ++epoch) {
        play(optimizer, net, comm, "FsFsFSFs", by_forward);
        const auto before = comm.statistics().operations;
        optimizer.flush();
        require(comm.statistics().operations > before, "a flush communicates");
        require_equal(optimizer.passes_since_communication(), 0);
      }
    });
  }
  require_equal(log.count(""), 0);
}

RANKS_TEST("a local step sends nothing, whatever communicates in the end", "[optim][counting]") {
  for (const auto type :
       {communication_type::neighbor_allreduce, communication_type::allreduce,
        communication_type::hierarchical_neighbor_allreduce, communication_type::none}) {
    const bool machines = type == communication_type::hierarchical_neighbor_allreduce;
    if (machines && !comm.is_homogeneous()) continue;
    mlp net = make_mlp(comm.rank());
    adapt_with_combine first(SGD(net->parameters(), 0.1), net, comm,
                             {.num_steps_per_communication = 3, .communication = type});
    play(first, net, comm, "FsFsFSFsFFS", true);
    adapt_then_combine second(SGD(net->parameters(), 0.1), net, comm,
                              {.backward_passes_per_step = 3, .communication = type});
    play(second, net, comm, "FsFsFSFsFFS", false);
  }
}

RANKS_TEST("forwards that record no gradient are passes to no wrapper", "[optim][counting]") {
  for (int kind = 0; kind < kinds; ++kind) {
    mlp net = make_mlp(0);
    with_wrapper(kind, net, comm, 2, [&](auto& optimizer) {
      const auto input = values({4, 5}, 1);
      play(optimizer, net, comm, "F", wrappers[kind].by_forward);
      {
        const torch::NoGradGuard guard;
        optimizer.forward(net, input);
      }
      {
        const c10::InferenceMode guard;
        optimizer.forward(net, input);
      }
      torch::ones({2}, torch::requires_grad()).sum().backward();  // reaches no parameter
      if (kind != 1) {  // calling forward() makes adapt_with_combine count by it
        net->eval();
        optimizer.forward(net, input);
        net->train();
      }
      require_equal(optimizer.passes_since_communication(), 1);
      play(optimizer, net, comm, "FS", wrappers[kind].by_forward);
    });
  }
}

namespace {

/// One layer that is used twice.
struct twice_impl : torch::nn::Module {
  twice_impl() { layer = register_module("layer", torch::nn::Linear(5, 5)); }
  at::Tensor forward(const at::Tensor& x) { return layer(torch::tanh(layer(x))); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE_IMPL(twice, twice_impl);

}  // namespace

RANKS_TEST("a layer used twice in one pass counts once, a second pass again", "[optim][counting]") {
  for (int kind = 0; kind < kinds; ++kind) {
    twice net;
    net->to(at::kDouble);
    fill(*net, 1);
    with_wrapper(kind, net, comm, 2, [&](auto& optimizer) {
      for (int pass = 1; pass <= 2; ++pass) {
        const auto input = values({4, 5}, pass);
        loss_of(wrappers[kind].by_forward ? optimizer.forward(net, input) : net->forward(input), 1)
            .backward();
        require_equal(optimizer.passes_since_communication(), pass);
      }
      optimizer.step();
      require_equal(optimizer.passes_since_communication(), 0);
    });
  }
}

RANKS_TEST("two models in one optimizer make one pass together", "[optim][counting]") {
  for (int kind = 0; kind < kinds; ++kind)
    for (const int passes : {1, 2, 3}) {
      mlp first = make_mlp(1), second = make_mlp(2);
      auto both = first->parameters();
      for (const auto& each : second->parameters()) both.push_back(each);
      torch::nn::Module nameless;
      auto* const names = &nameless;
      with_wrapper(
          kind, names, comm, passes,
          [&](auto& optimizer) {
            const auto answer = [&](mlp& net, int seed) {
              const auto input = values({4, 5}, seed);
              return wrappers[kind].by_forward ? optimizer.forward(net, input)
                                               : net->forward(input);
            };
            for (int window = 0; window < 2; ++window) {
              for (int pass = 1; pass <= passes; ++pass) {
                const auto loss =
                    loss_of(answer(first, pass), 1) + loss_of(answer(second, pass), 2);
                loss.backward();
                require_equal(optimizer.passes_since_communication(), pass);
              }
              optimizer.step();
              optimizer.zero_grad();
              require_equal(optimizer.passes_since_communication(), 0);
            }
          },
          both);
    }
}

RANKS_TEST("two models with local steps, in one optimizer or in one each, communicate by the rule",
           "[optim][counting]") {
  if (comm.size() > 4) return;  // long enough
  // Plays a program a window's part at a time, each ending with a step.
  const auto parts_of = [](std::string_view program, int passes) {
    std::vector<std::string> parts(1);
    for (const char each : by_rule(program, passes).first) {
      parts.back() += each;
      if (each != 'F') parts.emplace_back();
    }
    parts.pop_back();
    return parts;
  };
  const auto communications = [](const std::vector<std::string>& parts) {
    return std::ranges::count_if(parts, [](const auto& part) { return part.back() == 'S'; });
  };
  const auto require_bytes = [&](const auto& optimizer, std::int64_t sent, std::int64_t wanted) {
    if constexpr (requires { optimizer.round(); })
      require_equal(sent, comm.size() == 1 ? 0 : wanted);
    else
      require((sent > 0) == (wanted > 0 && comm.size() > 1), "only S sends");
  };
  constexpr std::int64_t two_models = 2 * one_model + 48;  // the second begins at a multiple of 64
  constexpr std::string_view first_program = "FsFsFFsFsFsFs", second_program = "FFsFsFsFFsFs";
  for (int kind = 0; kind < kinds; ++kind)
    for (const int passes : {1, 2, 3, 4}) {
      const bool by_forward = wrappers[kind].by_forward;
      captured_log log;
      mlp first = make_mlp(1), second = make_mlp(2);
      const auto bytes = [&] { return comm.statistics().bytes_sent; };
      {  // in one: each pass is one of both
        auto both = first->parameters();
        for (const auto& each : second->parameters()) both.push_back(each);
        torch::nn::Module nameless;
        auto* const names = &nameless;
        const auto play_both = [&](auto& optimizer) {
          for (const auto& part : parts_of(first_program, passes)) {
            const auto before = bytes();
            for (const char each : part) {
              const auto answer = [&](mlp& net) {
                const auto input = values({4, 5}, comm.rank());
                return by_forward ? optimizer.forward(net, input) : net->forward(input);
              };
              if (each == 'F') (loss_of(answer(first), 1) + loss_of(answer(second), 2)).backward();
            }
            optimizer.step();
            optimizer.zero_grad();
            require_equal(optimizer.passes_since_communication() == 0, part.back() == 'S');
            require_bytes(optimizer, bytes() - before, part.back() == 'S' ? two_models : 0);
          }
        };
        with_wrapper(kind, names, comm, passes, play_both, both);
      }
      // In one each, with windows of other lengths.
      const auto parts = parts_of(first_program, passes);
      const auto others = parts_of(second_program, 5 - passes);
      const auto play_each = [&](auto& optimizer) {
        const auto play_other = [&](auto& other) {
          const auto before = bytes();
          for (std::size_t i = 0; i < std::max(parts.size(), others.size()); ++i) {
            if (i < parts.size()) play(optimizer, first, comm, parts[i], by_forward);
            if (i < others.size()) play(other, second, comm, others[i], by_forward);
          }
          require_bytes(optimizer, bytes() - before,
                        (communications(parts) + communications(others)) * one_model);
        };
        with_wrapper(kind, second, comm, 5 - passes, play_other);
      };
      with_wrapper(kind, first, comm, passes, play_each);
      const int overrun = by_rule(first_program, passes).second,
                overrun_too = by_rule(second_program, 5 - passes).second;
      require_equal(log.count("a step() has to follow every"), 2 * overrun + overrun_too);
    }
}

RANKS_TEST("a generator and a discriminator with a wrapper each, one stepping more often",
           "[optim][counting]") {
  if (comm.size() > 4) return;  // long enough
  const int n = comm.size();
  // Losses of `passes` batches; the generator's reach the discriminator.
  const auto judge_loss = [](mlp& g, mlp& d, int seed) {
    return d->forward(values({4, 5}, seed)).square().mean() -
           torch::tanh(
               d->forward(torch::cat(
                   {g->forward(values({4, 5}, seed + 7)).detach(), values({4, 3}, seed)}, 1)))
               .mean();
  };
  const auto make_loss = [](mlp& g, mlp& d, int seed) {
    return d->forward(torch::cat({g->forward(values({4, 5}, seed + 9)), values({4, 3}, seed)}, 1))
        .square()
        .mean();
  };
  struct program {
    int kind;    // of wrapper
    int passes;  // per step
    int turns;   // of the generator per turn of the discriminator
  };
  constexpr int combines = 0, adapts = 2, reduces = 3;
  for (const auto& [kind, passes, turns] :
       {program{combines, 1, 2}, program{combines, 2, 1}, program{adapts, 1, 1},
        program{adapts, 2, 2}, program{reduces, 1, 2}, program{reduces, 2, 2}}) {
    captured_log log;
    // All ranks by hand: mean of all, before or after each rank's own step; or of the gradients.
    const int apart = kind == reduces ? 0 : 2;
    std::vector<mlp> makers, judges;
    for (int rank = 0; rank < n; ++rank) {
      makers.push_back(make_mlp(apart * rank));
      judges.push_back(make_mlp(apart * rank + 1));
    }
    const auto average = [&](std::vector<mlp>& nets, const auto& part) {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < nets[0]->parameters().size(); ++i) {
        at::Tensor mean = torch::zeros_like(nets[0]->parameters()[i]);
        for (auto& each : nets) mean += part(each->parameters()[i]) / n;
        for (auto& each : nets) part(each->parameters()[i]).copy_(mean);
      }
    };
    const auto value = [](const at::Tensor& parameter) { return parameter; };
    const auto gradient = [](const at::Tensor& parameter) { return parameter.grad(); };
    const auto step_by_hand = [&](std::vector<mlp>& nets) {
      if (kind == combines) average(nets, value);
      if (kind == reduces) average(nets, gradient);
      const double rate = kind == reduces ? 0.1 / passes : 0.1;
      {
        const torch::NoGradGuard no_grad;
        for (auto& each : nets)
          for (auto& parameter : each->parameters()) parameter.sub_(rate * parameter.grad());
      }
      if (kind == adapts) average(nets, value);
    };
    mlp maker = make_mlp(apart * comm.rank()), judge = make_mlp(apart * comm.rank() + 1);
    const auto train = [&](auto& makes, auto& decides) {
      for (int step = 0; step < 3; ++step) {
        const auto seed = [&](int rank, int turn, int pass) {
          return 100 * step + 30 * turn + 10 * pass + rank;
        };
        const auto by_hand = [&](std::vector<mlp>& nets, const auto& loss, int turn) {
          for (std::size_t rank = 0; rank < nets.size(); ++rank) {
            nets[rank]->zero_grad();
            for (int pass = 0; pass < passes; ++pass)
              loss(makers[rank], judges[rank], seed(static_cast<int>(rank), turn, pass)).backward();
          }
          step_by_hand(nets);
        };
        const auto by_wrapper = [&](auto& optimizer, mlp& net, const auto& loss, int turn) {
          step % 2 == 0 ? optimizer.zero_grad() : net->zero_grad();
          for (int pass = 0; pass < passes; ++pass)
            loss(maker, judge, seed(comm.rank(), turn, pass)).backward();
          optimizer.step();
          require_equal(optimizer.passes_since_communication(), 0);
        };
        by_hand(judges, judge_loss, 0);
        by_wrapper(decides, judge, judge_loss, 0);
        for (int turn = 0; turn < turns; ++turn) {
          by_hand(makers, make_loss, turn);
          by_wrapper(makes, maker, make_loss, turn);
        }
      }
    };
    constexpr auto all = communication_type::allreduce;
    SGD for_maker(maker->parameters(), 0.1), for_judge(judge->parameters(), 0.1);
    if (kind == combines) {
      adapt_with_combine makes(std::move(for_maker), maker, comm,
                               {.num_steps_per_communication = passes, .communication = all});
      adapt_with_combine decides(std::move(for_judge), judge, comm,
                                 {.num_steps_per_communication = passes, .communication = all});
      train(makes, decides);
    } else if (kind == adapts) {
      adapt_then_combine makes(std::move(for_maker), maker, comm,
                               {.backward_passes_per_step = passes, .communication = all});
      adapt_then_combine decides(std::move(for_judge), judge, comm,
                                 {.backward_passes_per_step = passes, .communication = all});
      train(makes, decides);
    } else {
      gradient_allreduce makes(std::move(for_maker), maker, comm,
                               {.backward_passes_per_step = passes, .bucket_bytes = 300});
      gradient_allreduce decides(std::move(for_judge), judge, comm,
                                 {.backward_passes_per_step = passes, .bucket_bytes = 300});
      train(makes, decides);
    }
    require_close(flatten(*maker), flatten(*makers[static_cast<std::size_t>(comm.rank())]), 1e-10);
    require_close(flatten(*judge), flatten(*judges[static_cast<std::size_t>(comm.rank())]), 1e-10);
    require_equal(log.count(""), 0);
  }
}

RANKS_TEST("a miscount can be an exception, of every wrapper", "[optim][counting]") {
  const auto check = [&](auto& optimizer, mlp& net, std::string_view option,
                         std::string_view counted, bool by_forward = true) {
    play(optimizer, net, comm, "FF", by_forward);
    const auto text =
        require_throws<usage_error>([&] { play(optimizer, net, comm, "F", by_forward); });
    require_contains(text, concat(option, " is 2"));
    require_contains(text, counted);
    optimizer.step();
    require_equal(optimizer.passes_since_communication(), 0);
  };
  constexpr auto raise = optim::miscount::raise;
  for (const int kind : {0, 1, 2, 3}) {
    mlp net = make_mlp(comm.rank());
    SGD sgd(net->parameters(), 0.1);
    if (kind == 0 || kind == 3) {
      adapt_with_combine optimizer(std::move(sgd), net, comm,
                                   {.num_steps_per_communication = 2, .on_miscount = raise});
      check(optimizer, net, "num_steps_per_communication", kind == 0 ? "3 forwards" : "3 backwards",
            kind == 0);
      require_equal(optimizer.round(), std::int64_t{1});
    } else if (kind == 1) {
      adapt_then_combine optimizer(std::move(sgd), net, comm,
                                   {.backward_passes_per_step = 2, .on_miscount = raise});
      check(optimizer, net, "backward_passes_per_step", "3 backwards");
    } else {
      gradient_allreduce optimizer(std::move(sgd), net, comm,
                                   {.backward_passes_per_step = 2, .on_miscount = raise});
      check(optimizer, net, "backward_passes_per_step", "3 backwards");
    }
  }
}

namespace {

/// As many parameters as ResNet-50 has, of different lengths.
struct many_impl : torch::nn::Module {
  many_impl() {
    for (std::int64_t i = 0; i < 161; ++i)
      all.push_back(register_parameter("p" + std::to_string(i), torch::ones({1 + i % 40})));
  }
  at::Tensor forward() const {
    at::Tensor sum = torch::zeros({});
    for (const auto& each : all) sum = sum + each.square().sum();
    return sum;
  }
  std::vector<at::Tensor> all;
};
TORCH_MODULE_IMPL(many, many_impl);

}  // namespace

RANKS_TEST("161 parameters cost no more messages than buckets", "[optim][counting]") {
  for (int kind = 0; kind < kinds; ++kind) {
    many net;
    with_wrapper(kind, net, comm, 1, [&](auto& optimizer) {
      std::int64_t sent = 0;
      for (int step = 0; step < 3; ++step) {
        const auto before = comm.statistics().messages_sent;
        net->forward().backward();
        optimizer.step();
        optimizer.zero_grad();
        sent = comm.statistics().messages_sent - before;
      }
      require_equal(sent, std::int64_t{comm.size() == 1 ? 0 : 1});
    });
  }
}

RANKS_TEST("forwards without gradients or in evaluation are not counted", "[optim][counting]") {
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.num_steps_per_communication = 2});
  const auto input = values({4, 5}, 1);
  play(optimizer, net, comm, "F", true);
  {
    const torch::NoGradGuard guard;
    const at::Tensor answer = optimizer.forward(net, input);
    require_same(answer, net->forward(input));
  }
  {
    const c10::InferenceMode guard;
    optimizer.forward(net, input);
  }
  net->eval();
  optimizer.forward(net, input);
  net->train();
  require_equal(optimizer.passes_since_communication(), 1);
  optimizer.forward(*net, input);  // a module instead of its holder
  require_equal(optimizer.passes_since_communication(), 2);
}

RANKS_TEST("adapt_then_combine counts backwards, not forwards", "[optim][counting]") {
  mlp net = make_mlp(comm.rank());
  adapt_then_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.backward_passes_per_step = 2});
  const auto answer = optimizer.forward(net, values({4, 5}, 1));
  loss_of(answer, 1).backward({}, /*retain_graph=*/true);
  require_equal(optimizer.passes_since_communication(), 1);
  loss_of(answer, 2).backward();
  require_equal(optimizer.passes_since_communication(), 2);
  optimizer.step();
  require_equal(optimizer.round(), std::int64_t{1});
}

RANKS_TEST("the accumulated gradient is what adapts", "[optim][counting]") {
  for (const bool combine_first : {true, false}) {
    simulation all(comm.size(),
                   [](mlp& each) { return std::make_unique<SGD>(each->parameters(), 0.1); });
    mlp net = make_mlp(comm.rank());
    const auto three = [](mlp& each, int rank) {
      at::Tensor sum = torch::zeros({}, at::kDouble);
      for (const int step : {1, 2, 3}) sum = sum + loss_in_step(step)(each, rank);
      return sum;
    };
    all.step(combine_first ? sequence::combine_first : sequence::adapt_first, three);
    const auto backwards = [&] {
      for (const int step : {1, 2, 3}) loss_in_step(step)(net, comm.rank()).backward();
    };
    SGD sgd(net->parameters(), 0.1);
    if (combine_first) {
      adapt_with_combine optimizer(std::move(sgd), net, comm, {.num_steps_per_communication = 3});
      backwards();
      optimizer.step();
    } else {
      adapt_then_combine optimizer(std::move(sgd), net, comm, {.backward_passes_per_step = 3});
      backwards();
      optimizer.step();
    }
    require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
  }
}

RANKS_TEST("where each step communicates, a rank whose backward reaches nothing takes part as well",
           "[optim][counting]") {
  if (comm.size() > 4) return;  // long enough
  const auto check = [&](auto wrap, sequence what) {
    simulation all(comm.size(),
                   [](mlp& each) { return std::make_unique<SGD>(each->parameters(), 0.1); });
    mlp net = make_mlp(comm.rank());
    auto optimizer = wrap(SGD(net->parameters(), 0.1), net);
    for (int step = 0; step < 5; ++step) {
      const auto loss = [&](mlp& each, int rank) {
        const bool misses = step > 0 && rank == step % comm.size();
        return misses ? torch::ones({2}, torch::requires_grad()).sum()
                      : loss_in_step(step)(each, rank);
      };
      all.step(what, loss);
      optimizer.zero_grad();
      loss(net, comm.rank()).backward();
      optimizer.step();
      require_equal(optimizer.passes_since_communication(), 0);
      require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
    }
  };
  check([&](SGD inner, mlp& net) { return adapt_then_combine(std::move(inner), net, comm); },
        sequence::adapt_first);
  for (const auto when : all_starts)
    check(
        [&](SGD inner, mlp& net) {
          return adapt_with_combine(std::move(inner), net, comm, {.start = when});
        },
        sequence::combine_first);
}

namespace {

/// A layer whose backward computes its forward anew, and goes backward through that.
struct made_anew : torch::autograd::Function<made_anew> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            torch::nn::LinearImpl* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    return layer->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const torch::AutoGradMode graph(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    auto* const layer =
        reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    layer->forward(x).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

}  // namespace

RANKS_TEST("a backward within a backward counts for itself, and so does what follows it",
           "[optim][counting]") {
  const auto loss = [](mlp& net, int rank, bool anew) {
    const auto x = torch::tanh(net->first(values({4, 5}, rank)));
    const auto y = anew ? made_anew::apply(x, net->second.get()) : net->second(x);
    return loss_of(net->last(torch::tanh(y)), rank);
  };
  mlp net = make_mlp(0), alone = make_mlp(0);
  gradient_allreduce optimizer(
      SGD(net->parameters(), 0.1), net, comm,
      {.backward_passes_per_step = 3, .average_aggregated_gradients = false, .bucket_bytes = 300});
  SGD plain(alone->parameters(), 0.1);
  captured_log log;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    loss(net, step + comm.rank(), true).backward();
    require_equal(optimizer.passes_since_communication(), 3);
    optimizer.step();
    plain.zero_grad();
    for (int rank = 0; rank < comm.size(); ++rank)
      (loss(alone, step + rank, false) / comm.size()).backward();
    plain.step();
    require_close(flatten(*net), flatten(*alone), 1e-12);
  }
  require_equal(log.count(""), 0);
}

RANKS_TEST("an epoch that cuts a window resets or flushes it", "[optim][counting]") {
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                               topology::fully_connected(comm.size()),
                               {.num_steps_per_communication = 3});
  play(optimizer, net, comm, "FsFs", true);
  require_equal(optimizer.passes_since_communication(), 2);
  optimizer.reset_passes();
  require_equal(optimizer.passes_since_communication(), 0);
  require_equal(optimizer.round(), std::int64_t{0});
  play(optimizer, net, comm, "FsFsFS", true);
  play(optimizer, net, comm, "Fs", true);
  optimizer.flush();
  require_equal(optimizer.round(), std::int64_t{2});
  require_equal(optimizer.passes_since_communication(), 0);
  require_close(allreduce(comm, flatten(*net)), flatten(*net), 1e-12);  // consensus
  optimizer.flush();
  require_equal(optimizer.round(), std::int64_t{3});
}

RANKS_TEST("gradients set by hand make every step count", "[optim][counting]") {
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.num_steps_per_communication = 2});
  for (int step = 0; step < 4; ++step) {
    for (auto& each : net->parameters()) each.mutable_grad() = torch::ones_like(each);
    optimizer.step();
  }
  require_equal(optimizer.round(), std::int64_t{2});
}

RANKS_TEST("what communicates can change between steps", "[optim][communication]") {
  const int n = comm.size();
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), 0.0), net, comm);
  const auto bytes_of_step = [&] {
    const auto before = comm.statistics().bytes_sent;
    play(optimizer, net, comm, "FS", false);
    return comm.statistics().bytes_sent - before;
  };
  optimizer.communication(communication_type::none);
  require_equal(bytes_of_step(), std::int64_t{0});
  require_same_parameters(*net, *make_mlp(comm.rank()));
  require_equal(optimizer.round(), std::int64_t{0});

  optimizer.communication(communication_type::neighbor_allreduce);
  require_equal(bytes_of_step(), n == 1 ? 0 : one_model);
  require_equal(optimizer.round(), std::int64_t{1});

  optimizer.communication(communication_type::allreduce);
  require(optimizer.communication() == communication_type::allreduce);
  require_near(static_cast<double>(bytes_of_step()), 2.0 * (n - 1) / n * one_model, 8);
  require_equal(optimizer.round(), std::int64_t{1});
  at::Tensor mean = torch::zeros_like(flatten(*net));
  for (int rank = 0; rank < n; ++rank) mean += flatten(*make_mlp(rank)) / n;
  require_close(flatten(*net), mean, 1e-12);
}

RANKS_TEST("one communication can have other neighbours", "[optim][communication]") {
  const int n = comm.size();
  if (n < 2) return;
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), 0.0), net, comm,
                               topology::ring(n, topology::ring_style::right));
  const int left = (comm.rank() + n - 1) % n, right = (comm.rank() + 1) % n;
  const auto text = require_throws<usage_error>([&] {
    optimizer.next(neighborhood{.sources = {{n, 0.5}}});
  });
  require_contains(text, "adapt_with_combine");
  optimizer.next({.self_weight = 0.75, .sources = {{right, 0.25}}, .destinations = {{left, 1.0}}});
  play(optimizer, net, comm, "FS", true);
  auto expected = 0.75 * flatten(*make_mlp(comm.rank())) + 0.25 * flatten(*make_mlp(right));
  require_close(flatten(*net), expected, 1e-12);
  require_equal(optimizer.round(), std::int64_t{1});  // other ranks may have followed the schedule
  play(optimizer, net, comm, "FS", true);
  const auto of_left = 0.75 * flatten(*make_mlp(left)) + 0.25 * flatten(*make_mlp(comm.rank()));
  require_close(flatten(*net), 0.5 * expected + 0.5 * of_left, 1e-12);
}

namespace {

/// All ranks' models in one, for averages written out.
class all_flat {
 public:
  explicit all_flat(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) values_.push_back(flatten(*make_mlp(rank)));
  }
  [[nodiscard]] const at::Tensor& of(int rank) const {
    return values_[static_cast<std::size_t>(rank)];
  }
  /// x_i <- the sum of `weight(i, j)` x_j over all j.
  template <class Weight>
  void mix(Weight weight) {
    const auto before = values_;
    for (std::size_t i = 0; i < before.size(); ++i) {
      values_[i] = torch::zeros_like(before[i]);
      for (std::size_t j = 0; j < before.size(); ++j)
        values_[i] += weight(static_cast<int>(i), static_cast<int>(j)) * before[j];
    }
  }

 private:
  std::vector<at::Tensor> values_;
};

/// Machines of `per_machine` ranks each, or one of all ranks if they are fewer.
template <class Comm>
void average_machines(Comm& comm, int per_machine) {
  const int n = comm.size();
  per_machine = std::min(per_machine, n);
  mlp net = make_mlp(comm.rank());
  const auto wrap = [&] {
    return adapt_then_combine(
        SGD(net->parameters(), 0.0), net, comm,
        {.communication = communication_type::hierarchical_neighbor_allreduce});
  };
  if (n % per_machine != 0) {
    require_contains(require_throws<usage_error>(wrap), "machines differ");
    return;
  }
  auto optimizer = wrap();
  all_flat all(n);
  const int machines = n / per_machine;
  int period = 1;
  while ((1 << period) < machines) ++period;
  for (int round = 0; round < 3; ++round) {
    play(optimizer, net, comm, "FS", false);
    const int hop = 1 << (round % period);
    all.mix([&](int i, int j) {
      const int to = i / per_machine, from = j / per_machine;
      const int other = (to + machines - hop % machines) % machines;
      return ((from == to ? 0.5 : 0) + (from == other ? 0.5 : 0)) / per_machine;
    });
    require_close(flatten(*net), all.of(comm.rank()), 1e-12);
  }
  require_equal(optimizer.round(), std::int64_t{3});
  if (per_machine == 1) return;
  const auto text = require_throws<usage_error>(
      [&] { optimizer.communication(communication_type::neighbor_allreduce); });
  require_contains(text, concat("the topology has ", machines, " ranks"));
}

/// Every type of communication over rings to the right, of ranks or of machines.
template <class Comm>
void communicate_in_any_order(Comm& comm, int per_machine) {
  const int n = comm.size();
  per_machine = std::min(per_machine, n);
  const int machines = n / per_machine;
  if (n % per_machine != 0) return;
  constexpr communication_type neighbors = communication_type::neighbor_allreduce,
                               hierarchical = communication_type::hierarchical_neighbor_allreduce,
                               everyone = communication_type::allreduce,
                               nobody = communication_type::none;
  const auto right = [](int place, int places) {
    if (places == 1) return neighborhood{};
    return neighborhood{.self_weight = 0.75,
                        .sources = {{(place + places - 1) % places, 0.25}},
                        .destinations = {{(place + 1) % places, 1.0}}};
  };
  for (const bool combine_first : {true, false}) {
    mlp net = make_mlp(comm.rank());
    all_flat all(n);
    const auto check = [&](auto& optimizer) {
      optimizer.on_round([&](std::int64_t) {
        return optimizer.communication() == hierarchical
                   ? right(comm.machine_rank(), comm.machine_size())
                   : right(comm.rank(), comm.size());
      });
      std::int64_t rounds = 0;
      for (const auto type : {neighbors, hierarchical, everyone, nobody, hierarchical, neighbors,
                              nobody, neighbors, everyone}) {
        optimizer.communication(type);
        play(optimizer, net, comm, "FS", false);
        all.mix([&](int i, int j) {
          if (type == everyone) return 1.0 / n;
          if (type == nobody) return i == j ? 1.0 : 0.0;
          const bool by_machine = type == hierarchical;
          const int to = by_machine ? i / per_machine : i, from = by_machine ? j / per_machine : j;
          const int places = by_machine ? machines : n;
          const double weight = places == 1                          ? 1.0
                                : to == from                         ? 0.75
                                : from == (to + places - 1) % places ? 0.25
                                                                     : 0.0;
          return by_machine ? weight / per_machine : weight;
        });
        require_close(flatten(*net), all.of(comm.rank()), 1e-12);
        rounds += type == neighbors || type == hierarchical ? 1 : 0;
        require_equal(optimizer.round(), rounds);
      }
    };
    SGD sgd(net->parameters(), 0.0);
    if (combine_first) {
      adapt_with_combine optimizer(std::move(sgd), net, comm);
      check(optimizer);
    } else {
      adapt_then_combine optimizer(std::move(sgd), net, comm, {.bucket_bytes = 300});
      check(optimizer);
    }
  }
}

}  // namespace

TEST_CASE("machines average as one, hierarchically (threads)", "[optim][communication][thread]") {
  for (const int each : {1, 2, 3})
    on_threads([&](auto& comm) { average_machines(comm, each); }, {.ranks_per_machine = each});
  for (const int each : {2, 3})
    run_threads(6, [&](auto& comm) { average_machines(comm, each); }, {.ranks_per_machine = each});
}
TEST_CASE("every type of communication does what it is defined to, in any order (threads)",
          "[optim][communication][thread]") {
  for (const int each : {1, 2})
    on_threads([&](auto& comm) { communicate_in_any_order(comm, each); },
               {.ranks_per_machine = each});
  run_threads(6, [](auto& comm) { communicate_in_any_order(comm, 2); }, {.ranks_per_machine = 2});
}
#ifdef BLUEFOG_TEST_MPI
TEST_CASE("machines average as one, hierarchically (MPI)", "[optim][communication][mpi]") {
  for (const int each : {1, 2, 3})
    on_mpi([&](auto& comm) { average_machines(comm, each); }, {.ranks_per_machine = each});
}
TEST_CASE("every type of communication does what it is defined to, in any order (MPI)",
          "[optim][communication][mpi]") {
  for (const int each : {1, 2})
    on_mpi([&](auto& comm) { communicate_in_any_order(comm, each); }, {.ranks_per_machine = each});
}
#endif

RANKS_TEST("a callback can choose the neighbours of every round, as a schedule does",
           "[optim][communication]") {
  const int n = comm.size();
  simulation all(n, [](mlp& each) { return std::make_unique<SGD>(each->parameters(), 0.1); });
  mlp net = make_mlp(comm.rank());
  std::vector<std::int64_t> asked;
  adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm, topology::ring(n));
  optimizer.on_round([&](std::int64_t round) {
    asked.push_back(round);
    if (n == 1) return neighborhood{};
    int period = 0;
    while ((1 << period) < n) ++period;
    const int hop = 1 << (round % period);
    return neighborhood{.self_weight = 0.5,
                        .sources = {{(comm.rank() + n - hop) % n, 0.5}},
                        .destinations = {{(comm.rank() + hop) % n, 1.0}}};
  });
  for (int step = 0; step < 5; ++step) {
    all.step(sequence::combine_first, loss_in_step(step));
    loss_in_step(step)(net, comm.rank()).backward();
    optimizer.step();
    optimizer.zero_grad();
    require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
  }
  require(asked == std::vector<std::int64_t>{0, 1, 2, 3, 4}, "asked once per round");

  optimizer.on_round([&](std::int64_t) { return neighborhood{.sources = {{n, 0.5}}}; });
  require_contains(require_throws<usage_error>([&] {
                     loss_in_step(5)(net, comm.rank()).backward();
                     optimizer.step();
                   }),
                   "adapt_with_combine");
  optimizer.on_round({});
  optimizer.zero_grad();
  const auto before = flatten(*net);
  optimizer.flush();  // over the ring again
  require_close(allreduce(comm, flatten(*net)), allreduce(comm, before), 1e-12);
  if (n > 1) require(!torch::equal(before, flatten(*net)), "the topology has its place back");
}

RANKS_TEST("every third communication can be an average over all ranks", "[optim][communication]") {
  const int n = comm.size();
  simulation all(n, [](mlp& each) { return std::make_unique<SGD>(each->parameters(), 0.1); });
  mlp net = make_mlp(comm.rank());
  adapt_then_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.backward_passes_per_step = 2, .global_average_every = 3});
  for (int step = 1; step <= 8; ++step) {
    for (int pass = 0; pass < 2; ++pass) loss_in_step(step + pass)(net, comm.rank()).backward();
    optimizer.step();
    optimizer.zero_grad();
    const auto loss = [&](mlp& each, int rank) {
      return loss_in_step(step)(each, rank) + loss_in_step(step + 1)(each, rank);
    };
    all.step(sequence::adapt_first, loss, step % 3 == 0);
    require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
    require_equal(optimizer.round(), std::int64_t{step - step / 3});
  }
  require_contains(require_throws<usage_error>([&] {
                     adapt_with_combine(SGD(net->parameters(), 0.1), net, comm,
                                        {.global_average_every = -1});
                   }),
                   "global_average_every must not be negative, got -1");
}

RANKS_TEST("wrong options, topologies and parameters are refused", "[optim][refusal]") {
  const int n = comm.size();
  mlp net = make_mlp(0);
  const auto sgd = [&] { return SGD(net->parameters(), 0.1); };
  require_contains(require_throws<usage_error>([&] {
                     adapt_with_combine(sgd(), net, comm, {.num_steps_per_communication = 0});
                   }),
                   "adapt_with_combine: num_steps_per_communication must be at least 1, got 0");
  require_contains(require_throws<usage_error>([&] {
                     adapt_then_combine(sgd(), net, comm, {.backward_passes_per_step = -2});
                   }),
                   "adapt_then_combine: backward_passes_per_step must be at least 1, got -2");
  require_contains(require_throws<usage_error>(
                       [&] { adapt_then_combine(sgd(), net, comm, {.bucket_bytes = 0}); }),
                   "bucket_bytes");
  require_contains(require_throws<usage_error>(
                       [&] { adapt_with_combine(sgd(), net, comm, topology::ring(n + 1)); }),
                   concat("the topology has ", n + 1, " ranks, the communicator has ", n));
  if (n == 1) return;
  const auto refused = [&](mlp& own) {
    return require_throws<mismatch_error>(
        [&] { adapt_with_combine(SGD(own->parameters(), 0.1), own, comm); });
  };
  mlp other(5, comm.rank() == n - 1 ? 17 : 16);
  const auto shapes = refused(other);
  require_contains(shapes, "first.weight");
  require_contains(shapes, "[17, 5]");
  require_contains(shapes, concat("rank ", n - 1));
  mlp types = make_mlp(0);
  if (comm.rank() == 1) types->last->to(at::kFloat);
  require_contains(refused(types), "last.weight");
  mlp frozen = make_mlp(0);
  if (comm.rank() == 0) frozen->second->bias.requires_grad_(false);
  require_contains(refused(frozen), "second.bias");
  const auto fewer = require_throws<mismatch_error>([&] {
    auto all = net->parameters();
    if (comm.rank() == 0) all.pop_back();
    adapt_with_combine(SGD(all, 0.1), net, comm);
  });
  require_contains(fewer, "last.bias");
  adapt_with_combine works(sgd(), net, comm);  // nothing is left behind
  play(works, net, comm, "FS", true);
}
