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

// CTAs of each rank, at most one an SM; the launch is cut to what the GPU holds at a time.
struct ExchangeTuning {
  DispatchPath dispatch = DispatchPath::kAuto;
  // 0: 14 for rows of 8 KB and more, 16 from 4 KB, 20 for shorter ones. On two H200s 14 CTAs fill the link (169 us at 58.5 MB) and 18 to 24 do not
  // (185 to 192); 7 KB rows of f8 want 16 (96 us, not 106).
  int dispatch_ctas = 0;
  // dispatch_chunks: 0: 24. Beside a permute that fills the memory 24 CTAs are worth 30 us (254 instead of 283).
  int chunk_ctas = 0;
  int bulk_warps = 0;        // 0: by row size
  int bulk_stages = 0;       // a warp; 0: by row size
  int bulk_chunk_bytes = 0;  // 0: by row size
  CombinePath combine = CombinePath::kAuto;
  int combine_ctas = 32;
  int combine_warps = 16, combine_stages = 2;  // of the bulk kernel; a stage is 2 KB of a warp
  int value_ctas = 132;                        // return_slot_values: short, and all latency
  bool fused_plan = true;                      // count and fill in one launch, where its CTAs fit on the GPU together
  int local_ctas = 0;                          // permute and its counterparts; 0: every SM twice
  ReducePath reduce = ReducePath::kAuto;
  int reduce_stages = 6;  // of the bulk reduction, 16 warps; a stage is 2 KB of a warp
  // reduce_and_combine: CTAs that combine, the others reduce; 0: 32 for rows of 4 KB and more, two launches for shorter ones; negative: two launches.
  int fused_combine_ctas = 0, fused_stages = 2;
  int arriving_ctas = 0;  // permute_arriving; 0: one on every SM that the dispatch leaves
  bool overlap_launches = true;
  // false: weights stay at home and the receive layout has none, for measuring what they cost. The one value that changes results.
  bool send_weights = true;
};

}  // namespace waybill::cuda
