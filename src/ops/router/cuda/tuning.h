// SPDX-License-Identifier: Apache-2.0
// Policy of the CUDA router: which kernel takes which problem and with how many rows in flight. It changes speed, never a result.
#pragma once

#include "ops/router/cuda/router_params.h"

namespace waybill::cuda::router_tuning {

// The warp kernels hold a row as num_vectors groups of 128 experts; the tiers are unrolled. Up to 8 vectors stay in registers, longer
// rows are staged in shared memory (sm_90).
inline constexpr int kVectorTiers[] = {1, 2, 4, 8, 18, 64};
constexpr int vector_tier(int E) {
  for (const int tier : kVectorTiers)
    if (E <= tier * 128) return tier;
  return 0;
}
inline constexpr int kMaxExperts = 8192;
inline constexpr int kMaxWarpK = 64;          // two slots a lane
inline constexpr int kMaxCandidates = 128;    // of a row after narrowing; more takes the exact path of the same kernel
inline constexpr int kMaxGroupedVectors = 8;  // grouped rows keep all keys in registers
inline constexpr int kMaxFastGroups = 64;

// What can be switched off to measure its worth.
struct Policy {
  bool quads = true;                    // four tokens a warp for short rows
  int max_counts_by_sum = kMaxExperts;  // up to so many counts are complete when they add up (router_counts.cuh); else by ticket
  bool early_counts = true;             // each CTA's last warp hands its counts over, where a kernel can (four-token kernel)
  bool sums_in_forward = true;          // score sums of long rows by the forward kernel
  bool early_sums = true;               // its CTAs' sums are added up before it has ended
};
inline Policy& policy() {
  static Policy policy;
  return policy;
}

// Rows of a warp in the dense backward pass of fp32 logits: shared memory holds two of short rows for every warp that an SM takes; of rows of
// 2,304, 22 warps with one are faster than 11 with two.
constexpr int backward_buffers(int E) { return E >= 384 && E <= 1024 ? 2 : 1; }

inline bool counts_by_sum(int E) { return E <= policy().max_counts_by_sum; }

}  // namespace waybill::cuda::router_tuning
