// SPDX-License-Identifier: Apache-2.0
// What may be chosen per shape: speed only, never results (but for send_weights). `bench_cuda_exchange --tune` sweeps it; docs/perf/exchange.md has the
// outcome.
#pragma once

#include <cstdint>

namespace waybill::cuda {

enum class DispatchPath : std::uint8_t {
  kAuto = 0,
  kPush = 1,  // plain loads and stores
  kBulk = 2,  // the SMs' copy engine (sm_90)
};

enum class CombinePath : std::uint8_t {
  kAuto = 0,
  kPull = 1,  // plain loads
  kBulk = 2,  // the SMs' copy engine (sm_90, D <= 32)
};

enum class ReducePath : std::uint8_t {
  kAuto = 0,
  kPlain = 1,  // plain loads
  kBulk = 2,   // the SMs' copy engine (sm_90, min(K, L) <= 64)
};

// 0: what tuning_table.h says for the size of a row. CTAs of each rank, at most one an SM; the launch is cut to what the GPU holds at a time.
struct ExchangeTuning {
  DispatchPath dispatch = DispatchPath::kAuto;
  int dispatch_ctas = 0;
  int chunk_ctas = 0;        // dispatch_chunks
  int bulk_warps = 0;        // 0: by row size
  int bulk_stages = 0;       // a warp; 0: by row size
  int bulk_chunk_bytes = 0;  // 0: by row size
  CombinePath combine = CombinePath::kAuto;
  int combine_ctas = 0;
  int combine_warps = 0, combine_stages = 0;  // of the bulk kernel; a stage is 2 KB of a warp
  int early_dispatch = 0;                     // start beside the end of the kernel before: 1 yes, -1 no, 0 by size of row
  int value_ctas = 132;                       // return_slot_values: short, and all latency
  bool fused_plan = true;                     // count and fill in one launch, where its CTAs fit on the GPU together
  bool fused_layout = true;                   // the same for count, scan and scatter
  int local_ctas = 0;                         // permute and its counterparts; 0: every SM twice, plain permute a warp for every part of a row
  int permute_parts = 0;                      // of a row, plain permute; 0: parts of 1 or 2 KB
  ReducePath reduce = ReducePath::kAuto;
  int reduce_stages = 0;                         // of the bulk reduction, 16 warps; a stage is 2 KB of a warp
  int fused_combine_ctas = 0, fused_stages = 0;  // reduce_and_combine: CTAs that combine, the others reduce; negative: two launches
  int arriving_ctas = 0;                         // permute_arriving; 0: one on every SM that the dispatch leaves
  bool overlap_launches = true;
  // false: weights stay at home and the receive layout has none, for measuring what they cost. The one value that changes results.
  bool send_weights = true;
};

}  // namespace waybill::cuda
