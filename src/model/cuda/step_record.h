// SPDX-License-Identifier: Apache-2.0
// What a step leaves behind on a GPU: counters per layer and rank, summed on the device over micro-batches and copied to pinned memory at the end of the
// step. The host reads it when the step's event has passed; nothing waits for it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "fabric/cuda_local/device_peers.h"
#include "moe/cuda/device_moe_report.h"
#include "ops/optimizer/cuda/optimizer_kernels.h"

namespace waybill::cuda {

struct RecordHeader {
  double loss_sum;                 // nats, this GPU's tokens
  std::int32_t overflows, unused;  // forwards of MoE layers whose budget was exceeded
  UpdateState update;
};
struct LayerRecord {
  std::int32_t overflows, unused;
  std::int64_t max_slot_demand, max_row_demand;  // of any rank and micro-batch
  double aux, sequence, global, z;               // of this GPU's ranks
};
struct RankRecord {
  std::int64_t slots, rows;
  std::int64_t min_expert_rows, max_expert_rows;  // of a micro-batch
};

// Offsets of the parts: header, layers [num_layers], ranks [num_layers, num_ranks], counts [num_layers, E of it]. Behind them, in the host's copy alone:
// waits [num_layers, num_ranks, W], nanoseconds as DeviceExchange::wait_ns().
struct RecordLayout {
  RecordLayout() = default;
  RecordLayout(const std::vector<std::int64_t>& experts, int num_ranks, int W);  // experts: E of every MoE layer
  std::size_t layer(std::size_t i) const { return sizeof(RecordHeader) + i * sizeof(LayerRecord); }
  std::size_t rank(std::size_t i, int r) const { return ranks + (i * static_cast<std::size_t>(num_ranks) + static_cast<std::size_t>(r)) * sizeof(RankRecord); }
  std::size_t wait(std::size_t i, int r) const {
    return bytes + (i * static_cast<std::size_t>(num_ranks) + static_cast<std::size_t>(r)) * static_cast<std::size_t>(W) * sizeof(std::uint64_t);
  }
  int num_ranks = 0, W = 0;
  std::size_t ranks = 0, bytes = 0, host_bytes = 0;
  std::vector<std::size_t> counts;  // of layer i: [E] i64
};

// Adds what one forward of one layer found. Queued behind the forward.
struct CollectCall {
  const DeviceMoeReport* reports[kMaxDevicePeers];  // pinned memory, by rank of the launch
  const std::int32_t* counts[kMaxDevicePeers];      // [E] routes of a rank's tokens
  int num_ranks;
  std::int64_t E;
  RecordHeader* header;
  LayerRecord* layer;
  RankRecord* ranks;
  std::int64_t* total_counts;
};
void launch_collect(const CollectCall& call, cudaStream_t stream);

// The aux-free update of a router bias (waybill/balance.h) from the counts of all GPUs, where the step is valid.
struct BiasUpdate {
  float* bias;  // [E]
  const std::int64_t* counts[kMaxUpdateDevices];
  int num_devices;
  std::int64_t E;
  float rate;
  bool subtract_mean;
  const UpdateState* state;
};
void launch_bias_update(const BiasUpdate& call, cudaStream_t stream);

// Counts of routes over the groups of a layer: sum [n] = parts[0] + ... in memory of every GPU; those of other GPUs are there once all have met.
struct SumGroups {
  const std::int32_t* parts[kMaxDevicePeers];
  int num_parts, n;
  std::int32_t* sum;
};
void launch_sum_groups(const SumGroups& call, cudaStream_t stream);

// parts[d] [count] of some GPUs, the num_devices ones that hold replicas: elements [begin, end) are summed in the GPUs' order and written to all of them. Each
// GPU takes its own slice, so that no two touch an element; all GPUs meet before and after.
struct SumOverDevices {
  float* parts[kMaxUpdateDevices];
  int num_devices;
  std::int64_t begin, end;
};
void launch_sum_over_devices(const SumOverDevices& call, cudaStream_t stream);

}  // namespace waybill::cuda
