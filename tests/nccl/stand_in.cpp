// SPDX-License-Identifier: Apache-2.0
// The stand-in itself: that it notices whoever breaks a rule of CUDA or NCCL.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "nccl/support.hpp"

using namespace bluefog;
using namespace bluefog_test;
using namespace std::chrono_literals;

namespace {

/// Two ranks of NCCL by hand, on one thread, and some memory of each one's device.
class two_ranks {
 public:
  static constexpr std::size_t bytes = 64;

  two_ranks() {
    ncclUniqueId id{};
    ncclGetUniqueId(&id);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    for (const int rank : {0, 1}) {
      cudaSetDevice(rank);
      cudaStreamCreateWithFlags(&streams[rank], cudaStreamNonBlocking);
      cudaMalloc(&memory[rank], bytes);
      ncclCommInitRankConfig(&comms[rank], 2, id, rank, &config);
    }
  }
  two_ranks(const two_ranks&) = delete;
  two_ranks& operator=(const two_ranks&) = delete;
  ~two_ranks() {
    for (const int rank : {0, 1}) {
      cudaSetDevice(rank);
      if (comms[rank] != nullptr) ncclCommAbort(comms[rank]);
      while (cudaStreamQuery(streams[rank]) == cudaErrorNotReady) std::this_thread::yield();
      cudaFree(memory[rank]);
      cudaStreamDestroy(streams[rank]);
    }
    cudaSetDevice(0);
    // What these leave behind is no business of the next test.
    static_cast<void>(stand_in::broken_rules());
  }

  void send(int rank, std::size_t count = bytes, ncclDataType_t type = ncclUint8) {
    ncclSend(memory[rank], count, type, 1 - rank, comms[rank], streams[rank]);
  }
  void receive(int rank, std::size_t count = bytes, ncclDataType_t type = ncclUint8) {
    ncclRecv(memory[rank], count, type, 1 - rank, comms[rank], streams[rank]);
  }
  void allreduce(int rank, std::size_t count = 8, ncclDataType_t type = ncclFloat32) {
    cudaSetDevice(rank);
    ncclAllReduce(memory[rank], memory[rank], count, type, ncclSum, comms[rank], streams[rank]);
    launch(rank);
  }
  /// Calls `act` inside a group of `rank`, which is on the stream when this returns.
  template <class Act>
  void group(int rank, Act act) {
    cudaSetDevice(rank);
    ncclGroupStart();
    act();
    ncclGroupEnd();
    launch(rank);
  }
  void launch(int rank) {
    cudaSetDevice(rank);
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) ncclCommGetAsyncError(comms[rank], &state);
  }
  void finish() {
    for (const int rank : {0, 1}) {
      cudaSetDevice(rank);
      while (cudaStreamQuery(streams[rank]) == cudaErrorNotReady) std::this_thread::yield();
    }
  }

  ncclComm_t comms[2] = {};
  cudaStream_t streams[2] = {};
  void* memory[2] = {};
};

/// Requires that the rule was broken that `text` is about.
void broken(const char* text) {
  CHECK_THAT(stand_in::broken_rules(), ContainsSubstring(text));
}

}  // namespace

TEST_CASE("whoever keeps NCCL's rules breaks none", "[nccl][stand_in]") {
  two_ranks ranks;
  for (const int rank : {0, 1}) {
    ranks.launch(rank);
    ranks.group(rank, [&] {
      ranks.send(rank, 8);
      ncclRecv(static_cast<std::byte*>(ranks.memory[rank]) + 8, 8, ncclUint8, 1 - rank,
               ranks.comms[rank], ranks.streams[rank]);
    });
    ranks.allreduce(rank);
  }
  ranks.finish();
  for (const int rank : {0, 1}) {
    cudaSetDevice(rank);
    ncclCommFinalize(ranks.comms[rank]);
    ranks.launch(rank);
    ncclCommDestroy(std::exchange(ranks.comms[rank], nullptr));
  }
  CHECK(stand_in::broken_rules() == "");
}

TEST_CASE("messages that do not fit are noticed when they are submitted", "[nccl][stand_in]") {
  two_ranks ranks;
  for (const int rank : {0, 1}) ranks.launch(rank);

  SECTION("because of their lengths") {
    ranks.group(0, [&] { ranks.send(0, 16); });
    ranks.group(1, [&] { ranks.receive(1, 12); });
    broken("rank 0 to rank 1: 16 elements of type 1 are sent, 12 of type 1 received");
  }
  SECTION("because of their types") {
    ranks.group(0, [&] { ranks.send(0, 4, ncclFloat32); });
    ranks.group(1, [&] { ranks.receive(1, 4, ncclInt32); });
    broken("4 elements of type 7 are sent, 4 of type 2 received");
  }
  SECTION("because nobody expected one in this group") {
    ranks.group(0, [&] { ranks.send(0); });
    ranks.group(0, [&] { ranks.send(0); });
    ranks.group(1, [&] { ranks.receive(1), ranks.receive(1); });
    broken("rank 0 to rank 1: sent in group 2 between them, received in 1");
  }
  SECTION("because ranks mix them with collectives in different orders") {
    ranks.group(0, [&] { ranks.send(0); });
    ranks.allreduce(0);
    ranks.allreduce(1);
    ranks.group(1, [&] { ranks.receive(1); });
    broken("rank 0 to rank 1: sent after 0 collectives, received after 1");
  }
}

TEST_CASE("collectives that differ between ranks are noticed", "[nccl][stand_in]") {
  two_ranks ranks;
  for (const int rank : {0, 1}) ranks.launch(rank);
  ranks.allreduce(0, 8);

  SECTION("in length") {
    ranks.allreduce(1, 9);
    broken("ranks call different collectives: allreduce 8 of type 7, operation 0 and allreduce 9");
  }
  SECTION("in type") {
    ranks.allreduce(1, 8, ncclInt32);
    broken("and allreduce 8 of type 2");
  }
  SECTION("in kind") {
    cudaSetDevice(1);
    ncclBroadcast(ranks.memory[1], ranks.memory[1], 32, ncclUint8, 0, ranks.comms[1],
                  ranks.streams[1]);
    broken("and broadcast 32 bytes from rank 0");
  }
}

TEST_CASE("calls at the wrong time are noticed", "[nccl][stand_in]") {
  two_ranks ranks;
  SECTION("before the call before is no longer in progress") {
    for (const int rank : {0, 1}) ranks.launch(rank);
    cudaSetDevice(0);
    ncclGroupStart();
    ranks.send(0);
    CHECK(ncclGroupEnd() == ncclInProgress);
    CHECK(ncclSend(ranks.memory[0], 1, ncclUint8, 1, ranks.comms[0], ranks.streams[0]) ==
          ncclInvalidArgument);
    broken("ncclSend while an earlier call is in progress");
  }
  SECTION("outside of a group") {
    for (const int rank : {0, 1}) ranks.launch(rank);
    cudaSetDevice(0);
    ranks.send(0);
    broken("ncclSend outside of a group");
  }
  SECTION("on another device than the communicator's") {
    cudaSetDevice(1);
    ncclResult_t state = ncclSuccess;
    ncclCommGetAsyncError(ranks.comms[0], &state);
    broken("ncclCommGetAsyncError with another device current than the communicator's");
  }
  SECTION("after the communicator was aborted, once more") {
    for (const int rank : {0, 1}) ranks.launch(rank);
    cudaSetDevice(0);
    const auto gone = std::exchange(ranks.comms[0], nullptr);
    ncclCommAbort(gone);
    CHECK(stand_in::broken_rules() == "");
    ncclCommAbort(gone);
    broken("ncclCommAbort of a communicator that is not there");
    ncclGroupEnd();
    broken("ncclGroupEnd without ncclGroupStart");
  }
  SECTION("after ncclCommFinalize") {
    for (const int rank : {0, 1}) ranks.launch(rank);
    cudaSetDevice(0);
    ncclCommFinalize(ranks.comms[0]);
    ranks.allreduce(0);
    broken("ncclAllReduce after ncclCommFinalize");
  }
  SECTION("destruction of a communicator that works") {
    for (const int rank : {0, 1}) ranks.launch(rank);
    ranks.allreduce(0);
    ncclCommDestroy(std::exchange(ranks.comms[0], nullptr));
    broken("a communicator was destroyed while it worked");
  }
}

TEST_CASE("what is used after its end is noticed", "[nccl][stand_in]") {
  two_ranks ranks;
  for (const int rank : {0, 1}) ranks.launch(rank);
  cudaSetDevice(0);

  SECTION("a stream") {
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaStreamDestroy(stream);
    cudaMemcpyAsync(ranks.memory[0], ranks.memory[0], 1, cudaMemcpyDefault, stream);
    broken("cudaMemcpyAsync on a stream that is not there");
    cudaStreamDestroy(stream);
    broken("cudaStreamDestroy of a stream that is not there");
  }
  SECTION("a stream, by NCCL") {
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaStreamDestroy(stream);
    ncclAllReduce(ranks.memory[0], ranks.memory[0], 1, ncclFloat32, ncclSum, ranks.comms[0],
                  stream);
    broken("ncclAllReduce on a stream that is not there");
  }
  SECTION("an event") {
    cudaEvent_t event = nullptr;
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaEventDestroy(event);
    cudaEventQuery(event);
    broken("cudaEventQuery of an event that is not there");
  }
  SECTION("memory, freed before the event that ends its use") {
    void* memory = nullptr;
    cudaMalloc(&memory, 32);
    cudaMemcpyAsync(memory, ranks.memory[0], 32, cudaMemcpyDefault, ranks.streams[0]);
    ranks.finish();
    cudaSetDevice(0);
    cudaFree(memory);
    CHECK(stand_in::broken_rules() == "");

    cudaMalloc(&memory, 32);
    const auto real = stand_in::stream_of(ranks.streams[0], "test");
    std::atomic<bool> go = false;
    real->give([&] {
      while (!go) std::this_thread::yield();
    });
    cudaMemcpyAsync(memory, ranks.memory[0], 32, cudaMemcpyDefault, ranks.streams[0]);
    std::jthread later([&] {
      std::this_thread::sleep_for(20ms);
      go = true;
    });
    cudaFree(memory);
    broken("cudaFree of memory that a stream still works on");
  }
  SECTION("memory, freed before a kernel that is to read or write it") {
    const nccl::kernels& kernels = nccl::kernels::of(0);
    void* memory[3] = {};
    for (void*& each : memory) cudaMalloc(&each, 32);
    const auto at = [&](int i) {
      return mutable_buffer{static_cast<std::byte*>(memory[i]), 8, dtype::float32};
    };
    const int freed = GENERATE(0, 1, 2);
    const auto real = stand_in::stream_of(ranks.streams[0], "test");
    std::atomic<bool> go = false;
    real->give([&] {
      while (!go) std::this_thread::yield();
    });
    if (GENERATE(false, true)) {
      const kernel::weighted_input input{0.5, at(2).data};
      kernels.mix(ranks.streams[0], at(0), 0.5, at(1), {&input, 1});
    } else {
      const std::array<const_buffer, 2> inputs{at(1), at(2)};
      kernels.reduce(ranks.streams[0], reduce_op::sum, at(0), inputs);
    }
    std::jthread later([&] {
      std::this_thread::sleep_for(5ms);
      go = true;
    });
    cudaFree(std::exchange(memory[freed], nullptr));
    broken("cudaFree of memory that a stream still works on");
    for (void* each : memory) cudaFree(each);
    CHECK(stand_in::broken_rules() == "");
  }
}

TEST_CASE("memory that a device cannot use is noticed", "[nccl][stand_in]") {
  two_ranks ranks;
  for (const int rank : {0, 1}) ranks.launch(rank);
  cudaSetDevice(0);
  std::array<float, 4> host{};
  ncclAllReduce(host.data(), host.data(), 4, ncclFloat32, ncclSum, ranks.comms[0],
                ranks.streams[0]);
  broken("ncclAllReduce of memory that the device does not reach");
  ranks.launch(0);
  ranks.allreduce(0, 1000);
  broken("ncclAllReduce of more memory than there is");
}
