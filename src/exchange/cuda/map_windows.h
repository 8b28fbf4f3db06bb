// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace waybill::cuda {

// Where dense maps lie in every arena.
struct MapWindows {
  std::uint64_t cells = 0;    // [P T_max, E] bytes, not 0: routed; rank p's tokens from p T_max on
  std::uint64_t weights = 0;  // [P T_max, E] f32
  std::uint64_t totals = 0;   // [P][2] int32: tokens of each rank, slots that it pads each expert to
  std::uint64_t tiles = 0;    // scratch: [2P][P plan_tiles] int32
};

}  // namespace waybill::cuda
