// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "fabric/cuda_local/device_peers.h"

namespace waybill::cuda {

// What the last forward of a step found, written by the device to host memory; read it whenever the stream has passed. No wait of its own.
struct DeviceMoeReport {
  std::uint64_t forwards = 0;  // forwards of this step so far, replays included; written last
  std::int32_t valid = 0;
  std::int32_t rows = 0, slots = 0;                                     // received by this rank
  std::int32_t min_expert_rows = 0, max_expert_rows = 0;                // of this rank's experts
  std::int32_t dropped_routes = 0;                                      // capacity mode: this rank's
  std::int64_t max_slot_demand = 0, max_row_demand = 0;                 // of any rank
  std::uint32_t dense_map_reasons = 0;                                  // DenseMapReason bits of the last forward
  std::uint32_t dense_map_forwards = 0;                                 // of `forwards`, those on the dense-map path
  double aux_loss = 0, sequence_loss = 0, global_loss = 0, z_loss = 0;  // this rank's share
  // Nanoseconds that the exchange's kernels of this rank have waited for rank p (of its node, where there are several), since the layer was made and up to this
  // forward (its own included, the backward passes before it too).
  std::uint64_t wait_ns[kMaxDevicePeers] = {};
};

}  // namespace waybill::cuda
