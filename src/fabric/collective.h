// SPDX-License-Identifier: Apache-2.0
// The collectives that ranks of a group must call in the same order; every engine names them alike in its errors.
#pragma once

#include <cstdint>

namespace waybill {

// kLeave is no collective: the last message of a rank that leaves its group (engines that send messages).
// The values cross process boundaries: new ones go to the end.
enum class Collective : std::uint32_t { kBarrier, kAllGather, kAllToAll, kAllReduce, kBroadcast, kSplit, kLeave };

constexpr const char* to_string(Collective collective) {
  switch (collective) {
    case Collective::kBarrier:
      return "barrier";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kSplit:
      return "split";
    case Collective::kLeave:
      return "leave";
  }
  return "unknown collective";
}

}  // namespace waybill
