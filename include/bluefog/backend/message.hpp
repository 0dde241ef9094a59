// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bluefog {

/// Independent sequences of messages between the ranks of a communicator.
enum class channel : std::uint8_t {
  group,  ///< operations that every rank calls: one number per call
  pair,   ///< operations of two ranks: one number per call and pair
};

/// Which operation a message belongs to; travels with it, so a stray message is never data.
struct message_tag {
  channel kind = channel::group;
  std::uint64_t number = 0;
  /// Every operation of this channel with a smaller number is over on this rank: a message that
  /// carries one belongs to nobody.
  std::uint64_t oldest = 0;
};

}  // namespace bluefog
