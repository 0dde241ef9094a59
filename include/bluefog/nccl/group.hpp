// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nccl.h>

#include <bluefog/core/error.hpp>
#include <bluefog/core/settings.hpp>
#include <bluefog/nccl/board.hpp>
#include <bluefog/nccl/bootstrap.hpp>
#include <bluefog/nccl/check.hpp>
#include <bluefog/nccl/connection.hpp>
#include <bluefog/nccl/handle.hpp>
#include <bluefog/nccl/library.hpp>

namespace bluefog::nccl {

/// Ranks that have found each other.
struct group {
  std::string name;           ///< unlike that of any other group of the job
  std::vector<int> machines;  ///< per rank: the lowest rank on its host
  int device = 0;             ///< of this rank
  std::shared_ptr<board> words;
  std::chrono::milliseconds timeout;

  [[nodiscard]] board::time_point deadline() const { return deadline_after(timeout); }
};

namespace detail {

/// \return what each rank gives as `own`, in rank order. Collective. Rank 0 collects, the others
///         read once.
[[nodiscard]] inline std::vector<std::string> gather_words(const meeting& of,
                                                           const std::string& topic,
                                                           const std::string& own) {
  const auto deadline = deadline_after(of.timeout);
  if (of.rank > 0) {
    of.words->put(concat(topic, "/", of.rank), own);
  } else {
    std::string all = own + "\n";
    for (int rank = 1; rank < of.size; ++rank)
      all += of.words->wait(concat(topic, "/", rank), deadline, concat("rank ", rank)) + "\n";
    of.words->put(topic, all);
  }
  const std::string all =
      of.words->wait(topic, deadline, concat("rank 0 with what all ranks say about their ", topic));
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < all.size();) {
    const auto end = all.find('\n', begin);
    lines.push_back(all.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// \return the device of this rank, which is number `local_rank` on its host.
[[nodiscard]] inline int choose_device(int local_rank) {
  const int count = library::device_count();
  expects(count > 0, "nccl_backend: no CUDA device is visible (driver, CUDA_VISIBLE_DEVICES)");
  const bool shared = settings::from_environment().allow_shared_device;
  const int wanted = std::getenv("LOCAL_RANK") == nullptr
                         ? local_rank
                         : number_from_environment("LOCAL_RANK", 0, 1 << 20);
  // A launcher may show each rank one device of its own.
  if (count == 1) return 0;
  expects(wanted < count || shared, "nccl_backend: the rank with local number ", wanted,
          " needs a device of its own, but only ", count, " are visible");
  return wanted % count;
}

/// Refuses two ranks on one device. \param devices  per rank: host and UUID.
inline void expects_own_devices(const std::vector<std::string>& devices) {
  if (settings::from_environment().allow_shared_device) return;
  for (std::size_t i = 0; i < devices.size(); ++i)
    for (std::size_t k = 0; k < i; ++k)
      expects(devices[i] != devices[k], "nccl_backend: ranks ", k, " and ", i,
              " use the same device (", devices[i],
              "), which NCCL does not; start one rank per device, or, to test on one device, set "
              "BLUEFOG_ALLOW_SHARED_DEVICE=1 and for each rank an NCCL_HOSTID of its own");
}

}  // namespace detail

namespace detail {

/// \return how often this rank has met the others on their board, this time included.
[[nodiscard]] inline int count_meeting(const meeting& of) {
  const std::string key = concat("meetings of rank ", of.rank);
  const auto before = of.words->look(key);
  const int now = before ? std::stoi(*before) + 1 : 1;
  of.words->put(key, std::to_string(now));
  return now;
}

}  // namespace detail

/// Finds out who is where. Collective. Ranks may meet on one board again and again.
[[nodiscard]] inline group make_group(const meeting& of) {
  detail::expects_place(of.rank, of.size);
  expects(of.words != nullptr, "nccl_backend: the meeting has no board");
  const std::string here = concat(" at meeting ", detail::count_meeting(of));
  const auto hosts = detail::gather_words(of, "hosts" + here, library::host());
  group made{
      .name = "all" + here, .machines = {}, .device = 0, .words = of.words, .timeout = of.timeout};
  int local_rank = 0;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto lowest = std::ranges::find(hosts, hosts[rank]) - hosts.begin();
    made.machines.push_back(static_cast<int>(lowest));
    const auto own = static_cast<std::size_t>(of.rank);
    if (rank < own && hosts[rank] == hosts[own]) ++local_rank;
  }
  // What goes wrong on one rank is told to all, so that nobody waits for it.
  std::string device;
  std::string problem;
  try {
    library::expects_matching_version();
    made.device = detail::choose_device(local_rank);
    const std::string host = library::host();
    device = host.substr(0, host.find('/')) + ", " + library::device_uuid(made.device);
  } catch (const error& reason) {
    problem = reason.what();
    std::ranges::replace(problem, '\n', ' ');
  }
  const auto devices =
      detail::gather_words(of, "devices" + here, problem.empty() ? "=" + device : problem);
  for (std::size_t rank = 0; rank < devices.size(); ++rank)
    expects(devices[rank].starts_with('='), devices[rank], " (rank ", rank, ")");
  detail::expects_own_devices(devices);
  return made;
}

/// \return the group of `members`, which all of them make with equal arguments, and this rank's
///         number in it.
[[nodiscard]] inline std::pair<group, int> make_subgroup(const group& of, int rank,
                                                         std::span<const int> members,
                                                         std::uint64_t serial) {
  group made = of;
  made.name += concat("/", serial, ":");
  made.machines.clear();
  int own = 0;
  for (const int member : members) {
    if (member == rank) own = static_cast<int>(made.machines.size());
    made.name += concat(member, ",");
    const auto same = [&](int other) {
      return of.machines[static_cast<std::size_t>(other)] ==
             of.machines[static_cast<std::size_t>(member)];
    };
    made.machines.push_back(
        static_cast<int>(std::ranges::find_if(members, same) - members.begin()));
  }
  return {std::move(made), own};
}

/// Connects the ranks of a group. Collective.
[[nodiscard]] inline std::shared_ptr<connection> connect(const group& of, int rank) {
  const auto deadline = of.deadline();
  const std::string key = "id of " + of.name;
  ncclUniqueId id{};
  if (rank == 0) {
    try {
      const device_scope scope(of.device);
      check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    } catch (const error& problem) {
      of.words->put(key, problem.what());
      throw;
    }
    of.words->put(key, "=" + std::string(id.internal, sizeof id.internal));
  } else {
    const auto text = of.words->wait(key, deadline, "rank 0 of the ranks " + of.name);
    expects<peer_error>(text.starts_with("="), "nccl_backend: rank 0 has failed: ", text);
    std::memcpy(id.internal, text.data() + 1, std::min(text.size() - 1, sizeof id.internal));
  }
  return std::make_shared<connection>(id, rank, static_cast<int>(of.machines.size()), of.device,
                                      of.words, deadline, of.name);
}

}  // namespace bluefog::nccl
