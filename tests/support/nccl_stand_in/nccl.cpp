// SPDX-License-Identifier: Apache-2.0
// The part of NCCL that the library uses, for ranks that are threads of one process.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>

#include <nccl.h>

#include "support/nccl_stand_in/stand_in.hpp"

using namespace bluefog_test::stand_in;

namespace {

std::size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    default: return 1;
  }
}

template <class T>
void combine(void* out, const void* in, std::size_t count, ncclRedOp_t op) {
  auto* to = static_cast<T*>(out);
  const auto* from = static_cast<const T*>(in);
  using wide = std::conditional_t<std::is_integral_v<T>, std::uint64_t, T>;
  for (std::size_t i = 0; i < count; ++i) switch (op) {
      case ncclSum:
        to[i] = static_cast<T>(static_cast<wide>(to[i]) + static_cast<wide>(from[i]));
        break;
      case ncclProd:
        to[i] = static_cast<T>(static_cast<wide>(to[i]) * static_cast<wide>(from[i]));
        break;
      case ncclMin: to[i] = std::min(to[i], from[i]); break;
      case ncclMax: to[i] = std::max(to[i], from[i]); break;
      default: broke("a reduction that the stand-in does not have"); return;
    }
}
void combine(void* out, const void* in, std::size_t count, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclInt8: return combine<std::int8_t>(out, in, count, op);
    case ncclUint8: return combine<std::uint8_t>(out, in, count, op);
    case ncclInt32: return combine<std::int32_t>(out, in, count, op);
    case ncclInt64: return combine<std::int64_t>(out, in, count, op);
    case ncclFloat32: return combine<float>(out, in, count, op);
    case ncclFloat64: return combine<double>(out, in, count, op);
    default: broke("a reduction of a type that the stand-in does not have");
  }
}

struct world;

}  // namespace

/// One rank's communicator.
struct ncclComm {
  std::shared_ptr<world> group;
  int rank = 0;
  int device = 0;
  bool blocking = true;
  std::atomic<bool> in_use = false;  // two threads at once would break a rule of NCCL
  // Under the world's mutex:
  bool aborted = false;
  bool finalized = false;
  ncclResult_t failure = ncclSuccess;
  int working = 0;                           // communications that have not ended
  std::uint64_t collectives = 0;             // given so far
  std::map<int, std::uint64_t> groups_with;  // given so far, by peer
  // Submitted, and put on the stream only later, as a call that does not block may do.
  std::vector<std::pair<std::shared_ptr<stream>, std::function<void()>>> launches;
  int polls = 0;
};

namespace {

/// One half of a message.
struct half {
  std::byte* data;
  std::size_t count;
  ncclDataType_t type;
  std::shared_ptr<void> in_use = {};
  bool done = false;
};

/// What both halves of a message have to agree in.
struct terms {
  std::size_t count;
  ncclDataType_t type;
  std::uint64_t group;        // the how manieth that the two ranks have between them
  std::uint64_t collectives;  // before it
};

struct collective {
  std::string signature;
  bool differs = false;
  int arrived = 0;
  bool done = false;
  std::vector<std::pair<const void*, void*>> memory;
};

/// What the communicators of a group share.
struct world {
  explicit world(int ranks) : size(ranks), members(static_cast<std::size_t>(ranks)) {}

  int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<ncclComm>> members;
  int joined = 0;
  bool broken = false;                                     // a member has aborted
  std::map<std::pair<int, int>, std::deque<half*>> sends;  // by sender and receiver
  std::map<std::pair<int, int>, std::deque<half*>> receives;
  std::map<std::pair<int, int>, std::deque<terms>> sending;  // given, and not compared yet
  std::map<std::pair<int, int>, std::deque<terms>> receiving;
  std::map<std::uint64_t, collective> collectives;

  // Compares what the two ranks of a line have given, long before anything may move or be stuck.
  void compare(std::pair<int, int> line) {
    auto& out = sending[line];
    auto& in = receiving[line];
    for (; !out.empty() && !in.empty(); out.pop_front(), in.pop_front()) {
      const terms& sent = out.front();
      const terms& expected = in.front();
      const std::string who =
          "rank " + std::to_string(line.first) + " to rank " + std::to_string(line.second) + ": ";
      if (sent.count != expected.count || sent.type != expected.type)
        broke(who + std::to_string(sent.count) + " elements of type " + std::to_string(sent.type) +
              " are sent, " + std::to_string(expected.count) + " of type " +
              std::to_string(expected.type) + " received");
      if (sent.group != expected.group)
        broke(who + "sent in group " + std::to_string(sent.group) + " between them, received in " +
              std::to_string(expected.group));
      if (sent.collectives != expected.collectives)
        broke(who + "sent after " + std::to_string(sent.collectives) +
              " collectives, received after " + std::to_string(expected.collectives));
    }
  }

  // Moves what both sides have posted.
  void match(std::pair<int, int> line) {
    auto& out = sends[line];
    auto& in = receives[line];
    while (!out.empty() && !in.empty()) {
      half& from = *out.front();
      half& to = *in.front();
      out.pop_front();
      in.pop_front();
      if (from.count == to.count && from.type == to.type)
        std::memcpy(to.data, from.data, from.count * bytes_of(from.type));
      from.done = to.done = true;
    }
    changed.notify_all();
  }
};

std::mutex registry_mutex;
std::map<std::string, std::weak_ptr<world>> worlds;
std::map<ncclComm_t, std::shared_ptr<ncclComm>> communicators;
std::uint64_t next_id = 1;
std::atomic<int> next_version = NCCL_VERSION_CODE;

std::shared_ptr<ncclComm> find(ncclComm_t handle, const char* call) {
  const std::scoped_lock lock(registry_mutex);
  const auto found = communicators.find(handle);
  if (found != communicators.end()) return found->second;
  broke(std::string(call) + " of a communicator that is not there");
  return nullptr;
}

/// Notes whether calls on one communicator overlap, and whether its device is the current one.
class call_scope {
 public:
  call_scope(std::shared_ptr<ncclComm> on, const char* call) : on_(std::move(on)) {
    if (!on_) return;
    if (on_->in_use.exchange(true)) broke(std::string(call) + " while another thread uses it");
    if (on_->device != current_device())
      broke(std::string(call) + " with another device current than the communicator's");
  }
  ~call_scope() {
    if (on_) on_->in_use = false;
  }
  ncclComm* operator->() const { return on_.get(); }
  explicit operator bool() const { return on_ != nullptr; }
  [[nodiscard]] const std::shared_ptr<ncclComm>& shared() const { return on_; }

 private:
  std::shared_ptr<ncclComm> on_;
};

/// A call inside a group.
struct member_call {
  std::shared_ptr<ncclComm> on;
  std::shared_ptr<stream> where;
  int peer;
  bool sends;
  half memory;
};
thread_local int depth = 0;
thread_local std::vector<member_call> open_group;

// What `call` gives because of how `on` is; ncclSuccess if it may go on.
ncclResult_t readiness(ncclComm& on, const char* call) {
  if (const int code = failing_call(call); code != 0) return static_cast<ncclResult_t>(code);
  const std::scoped_lock lock(on.group->mutex);
  if (on.failure != ncclSuccess) return on.failure;
  if (on.finalized) return broke(std::string(call) + " after ncclCommFinalize"), ncclInvalidUsage;
  if (on.group->joined == on.group->size && on.launches.empty()) return ncclSuccess;
  broke(std::string(call) + " while an earlier call is in progress");
  return ncclInvalidArgument;
}

// Puts `job` on the stream: at once, or after somebody has asked how it goes, as it may happen
// with a communicator whose calls do not block.
ncclResult_t launch(const std::shared_ptr<ncclComm>& on, const std::shared_ptr<stream>& where,
                    std::function<void()> job) {
  const std::scoped_lock lock(on->group->mutex);
  ++on->working;
  auto work = [on, job = std::move(job)] {
    job();
    const std::scoped_lock inside(on->group->mutex);
    --on->working;
  };
  if (on->blocking) return where->give(std::move(work)), ncclSuccess;
  ++where->launching;
  on->launches.emplace_back(where, std::move(work));
  on->polls = 0;
  return ncclInProgress;
}

void run_group(const std::shared_ptr<ncclComm>& on, std::vector<member_call> calls) {
  auto& group = *on->group;
  std::unique_lock lock(group.mutex);
  if (on->aborted) return;
  if (const int code = failing_code(); code != 0) {
    on->failure = static_cast<ncclResult_t>(code);
    group.changed.wait(lock, [&] { return on->aborted; });
    return;
  }
  for (auto& each : calls) {
    const auto line = each.sends ? std::pair(on->rank, each.peer) : std::pair(each.peer, on->rank);
    (each.sends ? group.sends : group.receives)[line].push_back(&each.memory);
    group.match(line);
  }
  const auto done = [&] {
    return std::ranges::all_of(calls, [](const member_call& each) { return each.memory.done; });
  };
  group.changed.wait(lock, [&] { return on->aborted || done(); });
  if (done()) return;
  for (auto* side : {&group.sends, &group.receives})
    for (auto& [line, halves] : *side)
      std::erase_if(halves, [&](half* each) {
        return std::ranges::any_of(calls, [&](const auto& own) { return &own.memory == each; });
      });
}

// Tells the world what a group is to move.
void announce(ncclComm& on, const std::vector<member_call>& calls) {
  auto& group = *on.group;
  const std::scoped_lock lock(group.mutex);
  std::set<int> peers;
  for (const auto& each : calls) peers.insert(each.peer);
  for (const int peer : peers) ++on.groups_with[peer];
  for (const auto& each : calls) {
    const auto line = each.sends ? std::pair(on.rank, each.peer) : std::pair(each.peer, on.rank);
    (each.sends ? group.sending : group.receiving)[line].push_back(
        {each.memory.count, each.memory.type, on.groups_with[each.peer], on.collectives});
    group.compare(line);
  }
}

ncclResult_t submit(std::vector<member_call> calls) {
  std::vector<std::shared_ptr<ncclComm>> used;
  for (const auto& each : calls)
    if (std::ranges::find(used, each.on) == used.end()) used.push_back(each.on);
  ncclResult_t result = ncclSuccess;
  for (const auto& on : used) {
    std::vector<member_call> own;
    for (const auto& each : calls)
      if (each.on == on) own.push_back(each);
    announce(*on, own);
    const auto where = own.front().where;
    result = launch(on, where, [on, own] { run_group(on, own); });
  }
  return result;
}

ncclResult_t message(std::byte* data, std::size_t count, ncclDataType_t type, int peer,
                     ncclComm_t handle, cudaStream_t where, bool sends, const char* call) {
  const call_scope on(find(handle, call), call);
  const auto to = stream_of(where, call);
  if (!on || !to) return ncclInvalidArgument;
  if (const auto code = readiness(*on.shared(), call); code != ncclSuccess) return code;
  if (peer < 0 || peer >= on->group->size || peer == on->rank) return ncclInvalidArgument;
  if (count == 0) broke(std::string(call) + " of nothing");
  if (depth == 0) return broke(std::string(call) + " outside of a group"), ncclInvalidUsage;
  open_group.push_back(
      {on.shared(), to, peer, sends, {data, count, type, use(data, count * bytes_of(type), call)}});
  return ncclSuccess;
}

// Tells the world of a collective. \return its number.
std::uint64_t announce(ncclComm& on, const std::string& signature) {
  const std::scoped_lock lock(on.group->mutex);
  auto& it = on.group->collectives[on.collectives];
  if (it.signature.empty()) it.signature = signature;
  if (it.signature != signature) {
    it.differs = true;
    broke("ranks call different collectives: " + it.signature + " and " + signature);
  }
  return on.collectives++;
}

ncclResult_t together(const void* in, void* out, std::size_t bytes, const std::string& signature,
                      ncclComm_t handle, cudaStream_t where, const char* call,
                      std::function<void(collective&)> compute) {
  const call_scope on(find(handle, call), call);
  const auto to = stream_of(where, call);
  if (!on || !to) return ncclInvalidArgument;
  if (const auto code = readiness(*on.shared(), call); code != ncclSuccess) return code;
  if (depth != 0) broke(std::string(call) + " inside a group");
  const std::array used{use(in, bytes, call), use(out, bytes, call)};
  const auto number = announce(*on.shared(), signature);
  return launch(on.shared(), to, [own = on.shared(), in, out, number, used, compute] {
    static_cast<void>(used);
    auto& group = *own->group;
    std::unique_lock lock(group.mutex);
    if (own->aborted) return;
    if (const int code = failing_code(); code != 0) {
      own->failure = static_cast<ncclResult_t>(code);
      group.changed.wait(lock, [&] { return own->aborted; });
      return;
    }
    auto& it = group.collectives[number];
    it.memory.resize(static_cast<std::size_t>(group.size));
    it.memory[static_cast<std::size_t>(own->rank)] = {in, out};
    if (++it.arrived == group.size) {
      if (!it.differs) compute(it);
      it.done = true;
      group.changed.notify_all();
    }
    group.changed.wait(lock, [&] { return own->aborted || it.done; });
  });
}

}  // namespace

void bluefog_test::stand_in::nccl_version(int code) {
  next_version = code;
}

extern "C" {

const char* ncclGetErrorString(ncclResult_t) {
  return "an error of the stand-in";
}
const char* ncclGetLastError(ncclComm_t) {
  return "";
}
ncclResult_t ncclGetVersion(int* version) {
  return *version = next_version.exchange(NCCL_VERSION_CODE), ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (const int code = failing_call("ncclGetUniqueId"); code != 0)
    return static_cast<ncclResult_t>(code);
  const std::scoped_lock lock(registry_mutex);
  std::memset(id->internal, 0, sizeof id->internal);
  const auto text = "stand-in " + std::to_string(next_id++);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (const int code = failing_call("ncclCommInitRankConfig"); code != 0)
    return static_cast<ncclResult_t>(code);
  auto made = std::make_shared<ncclComm>();
  made->rank = rank;
  made->device = current_device();
  made->blocking = config == nullptr || config->blocking != 0;
  const std::scoped_lock lock(registry_mutex);
  auto& known = worlds[std::string(id.internal, sizeof id.internal)];
  made->group = known.lock();
  if (!made->group) known = made->group = std::make_shared<world>(size);
  auto& group = *made->group;
  const std::scoped_lock inside(group.mutex);
  if (size != group.size || rank < 0 || rank >= size ||
      group.members[static_cast<std::size_t>(rank)])
    return ncclInvalidArgument;
  for (const auto& other : group.members)
    if (other && other->device == made->device) return ncclInvalidUsage;  // duplicate GPU
  group.members[static_cast<std::size_t>(rank)] = made;
  ++group.joined;
  *handle = made.get();
  communicators[made.get()] = made;
  count_object(1);
  return made->blocking ? ncclSuccess : ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* state) {
  const call_scope on(find(handle, "ncclCommGetAsyncError"), "ncclCommGetAsyncError");
  if (!on) return ncclInvalidArgument;
  if (const int code = failing_call("ncclCommGetAsyncError"); code != 0)
    return static_cast<ncclResult_t>(code);
  const std::scoped_lock lock(on->group->mutex);
  *state = on->failure != ncclSuccess            ? on->failure
           : on->group->broken                   ? ncclRemoteError
           : on->group->joined < on->group->size ? ncclInProgress
           : on->finalized && on->working > 0    ? ncclInProgress
                                                 : ncclSuccess;
  if (*state != ncclSuccess || on->launches.empty()) return ncclSuccess;
  if (++on->polls < 2) return *state = ncclInProgress, ncclSuccess;
  for (auto& [where, work] : on->launches) {
    where->give(std::move(work));
    --where->launching;
  }
  on->launches.clear();
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  const call_scope on(find(handle, "ncclCommFinalize"), "ncclCommFinalize");
  if (!on) return ncclInvalidArgument;
  if (const auto code = readiness(*on.shared(), "ncclCommFinalize"); code != ncclSuccess)
    return code;
  const std::scoped_lock lock(on->group->mutex);
  on->finalized = true;
  return on->working > 0 ? ncclInProgress : ncclSuccess;
}

static ncclResult_t leave(ncclComm_t handle, bool abort, const char* call) {
  std::shared_ptr<ncclComm> ending = find(handle, call);
  if (!ending) return ncclInvalidArgument;
  {
    const call_scope on(ending, call);
    const std::scoped_lock lock(ending->group->mutex);
    ending->aborted = true;
    if (abort && aborts_are_seen() && ending->group->joined == ending->group->size)
      ending->group->broken = true;
    if (!abort && ending->working > 0) broke("a communicator was destroyed while it worked");
    for (auto& [where, work] : ending->launches) --where->launching;
    ending->launches.clear();
    ending->group->members[static_cast<std::size_t>(ending->rank)] = nullptr;
  }
  ending->group->changed.notify_all();
  const std::scoped_lock lock(registry_mutex);
  communicators.erase(handle);
  count_object(-1);
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (const int code = failing_call("ncclCommDestroy"); code != 0)
    return static_cast<void>(leave(handle, true, "ncclCommDestroy")),
           static_cast<ncclResult_t>(code);
  return leave(handle, false, "ncclCommDestroy");
}
ncclResult_t ncclCommAbort(ncclComm_t handle) {
  count_abort();
  pass_abort(abort_hangs::before);
  const ncclResult_t result = leave(handle, true, "ncclCommAbort");
  pass_abort(abort_hangs::after);
  return result;
}

ncclResult_t ncclGroupStart() {
  return ++depth, ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (depth == 0) return broke("ncclGroupEnd without ncclGroupStart"), ncclInvalidUsage;
  if (--depth > 0) return ncclSuccess;
  auto calls = std::exchange(open_group, {});
  if (const int code = failing_call("ncclGroupEnd"); code != 0)
    return static_cast<ncclResult_t>(code);
  return submit(std::move(calls));
}

ncclResult_t ncclSend(const void* data, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t on, cudaStream_t where) {
  auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));  // only read
  return message(bytes, count, type, peer, on, where, true, "ncclSend");
}
ncclResult_t ncclRecv(void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t on,
                      cudaStream_t where) {
  return message(static_cast<std::byte*>(data), count, type, peer, on, where, false, "ncclRecv");
}

ncclResult_t ncclAllReduce(const void* in, void* out, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t on, cudaStream_t where) {
  const auto bytes = count * bytes_of(type);
  const auto signature = "allreduce " + std::to_string(count) + " of type " + std::to_string(type) +
                         ", operation " + std::to_string(op);
  return together(in, out, bytes, signature, on, where, "ncclAllReduce", [=](collective& it) {
    if (bytes == 0) return;
    std::vector<std::byte> result(bytes);
    std::memcpy(result.data(), it.memory[0].first, bytes);
    for (std::size_t rank = 1; rank < it.memory.size(); ++rank)
      combine(result.data(), it.memory[rank].first, count, type, op);
    for (const auto& [source, target] : it.memory) std::memcpy(target, result.data(), bytes);
  });
}

ncclResult_t ncclBroadcast(const void* in, void* out, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t on, cudaStream_t where) {
  const auto bytes = count * bytes_of(type);
  const auto signature =
      "broadcast " + std::to_string(bytes) + " bytes from rank " + std::to_string(root);
  return together(in, out, bytes, signature, on, where, "ncclBroadcast", [=](collective& it) {
    const void* source = it.memory[static_cast<std::size_t>(root)].first;
    for (const auto& [unused, target] : it.memory)
      if (target != source && bytes > 0) std::memcpy(target, source, bytes);
  });
}

}  // extern "C"
