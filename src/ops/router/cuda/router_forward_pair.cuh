// SPDX-License-Identifier: Apache-2.0
// Router forward for short rows (E = 128 or 256, K <= 16, no bias, mask or groups): one warp takes two tokens, 16 lanes each, so that
// the steps whose cost does not depend on E (threshold, ranking, weights) are paid once for two rows. Method and results are those of
// router_forward_warp.cuh; rows with too many candidates fall back to its exact path, one row at a time.
#pragma once

#include <atomic>

#include "core/cuda/launch.h"
#include "ops/router/cuda/router_forward_warp.cuh"

namespace waybill::cuda {

inline constexpr int kPairCandidates = 64;  // of one row
inline constexpr int kPairMaxK = 16;

// Of one warp.
struct alignas(16) PairScratch {
  std::uint64_t key[2][kPairCandidates];  // (key, id) composites
  float x[2][kPairCandidates];
  float score[2][kPairMaxK];
  std::uint16_t id[2][kPairCandidates], sorted_id[2][kPairMaxK];
};

// Reductions over the 16 lanes of a half.
__device__ __forceinline__ float half_max(float v) {
#pragma unroll
  for (int step = 8; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(ptx::kFullWarp, v, step));
  return v;
}
__device__ __forceinline__ float half_min(float v) {
#pragma unroll
  for (int step = 8; step > 0; step >>= 1) v = fminf(v, __shfl_xor_sync(ptx::kFullWarp, v, step));
  return v;
}
__device__ __forceinline__ float half_sum(float v) {
#pragma unroll
  for (int step = 8; step > 0; step >>= 1) v += __shfl_xor_sync(ptx::kFullWarp, v, step);
  return v;
}

// As group_threshold(), for both halves at once. Lanes without a candidate hold -Inf.
template <int kGroups>
__device__ __forceinline__ float pair_threshold(const float (&group_max)[kGroups], int K, unsigned half_mask) {
  float largest = group_max[0], smallest = kInfinity;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    largest = fmaxf(largest, group_max[g]);
    smallest = fminf(smallest, group_max[g] == -kInfinity ? kInfinity : group_max[g]);
  }
  float low = half_min(smallest), high = half_max(largest);
  int count = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) count += __popc(__ballot_sync(ptx::kFullWarp, group_max[g] > -kInfinity) & half_mask);
  bool done = count < K;
  if (done) low = -3.402823466e38f;
  const int enough = K + K / 2;
#pragma unroll 1
  for (int round = 0; round < 24; ++round) {
    const float middle = 0.5f * low + 0.5f * high;
    done = done || !(middle > low && middle < high);
    if (__all_sync(ptx::kFullWarp, done)) break;
    int reached = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) reached += __popc(__ballot_sync(ptx::kFullWarp, group_max[g] >= middle) & half_mask);
    if (!done) {
      if (reached >= K) {
        low = middle;
        done = reached <= enough;
      } else {
        high = middle;
      }
    }
  }
  return low;
}

// Rows t and t + 1; kVectors groups of 64 experts a row. False: both rows must go through route_exactly(); nothing but rows that are
// not finite was counted.
template <class T, int kVectors>
__device__ __forceinline__ bool route_pair(const RouterForwardParams& p, int t, PairScratch& scratch, std::uint32_t* hist) {
  const RouterRows& rows = p.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31, sub = lane & 15, half = lane >> 4, K = rows.K;
  const unsigned half_mask = half == 0 ? 0x0000ffffu : 0xffff0000u, below = ptx::lanemask_lt() & half_mask;
  const int mine_t = t + half;
  const bool exists = mine_t < static_cast<int>(rows.T), active = exists && !(rows.padding != nullptr && rows.padding[exists ? mine_t : t] != 0);
  float f[kVectors][4];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    f[v][0] = f[v][1] = f[v][2] = f[v][3] = -kInfinity;
    if (active) load4<T, true>(row_of<T>(rows, mine_t) + v * 64 + sub * 4, f[v]);
  }
  float poison = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) poison = __fmaf_rn(f[v][i], 0.0f, poison);
  }
  const unsigned poisoned = __ballot_sync(ptx::kFullWarp, active && poison != poison);
  if (poisoned != 0) {
    count_nonfinite_rows(p.status, ((poisoned & 0xffffu) != 0) + ((poisoned >> 16) != 0));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f[v][i] = scalar::is_finite(f[v][i]) ? f[v][i] : -kInfinity;
    }
  }
  constexpr int kGroups = 2, kPer = kVectors / kGroups;
  float group_max[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    group_max[g] = -kInfinity;
#pragma unroll
    for (int v = g * kPer; v < (g + 1) * kPer; ++v) group_max[g] = fmaxf(group_max[g], fmaxf(fmaxf(f[v][0], f[v][1]), fmaxf(f[v][2], f[v][3])));
  }
  const bool is_softmax = rows.score == kScoreSoftmax || rows.score == kScoreSoftmaxSelected;
  const bool need_sum = rows.score == kScoreSoftmax && rows.renormalise == 0;
  float row_max = 0.0f, row_sum = 1.0f;
  if (need_sum) {
    row_max = half_max(fmaxf(group_max[0], group_max[1]));
    row_sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) row_sum += row_max == -kInfinity ? 0.0f : ptx::ex2_approx((f[v][i] - row_max) * 1.44269504f);
    }
    row_sum = half_sum(row_sum);
  }
  const float threshold = fmaxf(lowered_threshold(kPlain, rows.score, pair_threshold(group_max, K, half_mask)), -3.402823466e38f);
  int mine = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) mine += f[v][i] >= threshold;
  }
  int slot = 0, count = 0;
#pragma unroll
  for (int bit = 0; bit < 5; ++bit) {
    if (bit >= 2 && !__any_sync(ptx::kFullWarp, (mine >> bit) != 0)) break;
    const unsigned lanes = __ballot_sync(ptx::kFullWarp, ((mine >> bit) & 1) != 0);
    slot += __popc(lanes & below) << bit, count += __popc(lanes & half_mask) << bit;
  }
  if (__any_sync(ptx::kFullWarp, count > kPairCandidates)) return false;
  if (mine != 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (f[v][i] >= threshold) {
          scratch.x[half][slot] = f[v][i], scratch.id[half][slot] = static_cast<std::uint16_t>(v * 64 + sub * 4 + i);
          ++slot;
        }
      }
    }
  }
  __syncwarp();
  const int most = max(__shfl_sync(ptx::kFullWarp, count, 0), __shfl_sync(ptx::kFullWarp, count, 16));
#pragma unroll 1
  for (int i = sub; i < (most + 15) / 16 * 16; i += 16) {  // scores and composites; 0 beyond the half's count
    std::uint64_t composite = 0;
    if (i < count) {
      const float s = selection_score(rows.score, scratch.x[half][i]);
      composite = composite_of(scalar::order_key(s), scratch.id[half][i]);
      scratch.x[half][i] = s;
    }
    scratch.key[half][i] = composite;
  }
  __syncwarp();
#pragma unroll 1
  for (int i = sub; i < (most + 15) / 16 * 16; i += 16) {
    const std::uint64_t own = scratch.key[half][i];
    int rank = 0;
#pragma unroll 2
    for (int j = 0; j < most; j += 2) {
      const ulonglong2 other = *reinterpret_cast<const ulonglong2*>(&scratch.key[half][j]);
      if (other.x > own) ++rank;
      if (other.y > own) ++rank;
    }
    if (i < count && rank < K) scratch.score[half][rank] = scratch.x[half][i], scratch.sorted_id[half][rank] = static_cast<std::uint16_t>(id_of(own));
  }
  __syncwarp();
  const int chosen = min(count, K);
  const bool has = sub < chosen;
  float s = has ? scratch.score[half][sub] : 0.0f;
  const int id = has ? scratch.sorted_id[half][sub] : -1;
  const bool renormalise = rows.renormalise != 0 || rows.score == kScoreSoftmaxSelected;
  float sum = 1.0f;
  if (is_softmax) {
    const float shift = renormalise ? __shfl_sync(ptx::kFullWarp, s, half * 16) : row_max;
    s = has ? exp_difference(s, shift) : 0.0f;
    sum = row_sum;
  }
  if (renormalise) {
    sum = half_sum(s);
    const bool rare = (!is_softmax && active && chosen > 0 && !(sum > 1e-12f)) || rows.epsilon > 0.0f;
    if (__any_sync(ptx::kFullWarp, rare)) return false;  // underflow or parity
  }
  const unsigned is_short = __ballot_sync(ptx::kFullWarp, active && chosen < K);
  if (is_short != 0) count_short_rows(p.status, ((is_short & 0xffffu) != 0) + ((is_short >> 16) != 0));
  if (exists && sub == 0 && chosen < K) atomicAdd(hist + rows.E, static_cast<std::uint32_t>(K - chosen));
  if (p.ids != nullptr && exists && sub < K) {
    const std::int64_t at = static_cast<std::int64_t>(mine_t) * K + sub;
    store_id(p.ids, p.id_bytes, at, id);
    const float factor = scalar::mul(rows.scale, ptx::rcp_approx(fmaxf(sum, 1e-30f)));
    p.weights[at] = scalar::mul(s, factor);
    if (sub == 0) store_factor(rows, p.factors, mine_t, chosen > 0 ? factor : 0.0f);
  }
  if (has) atomicAdd(hist + id, 1u);
  __syncwarp();
  return true;
}

inline constexpr int kPairThreads = 512;  // two CTAs an SM; one of 1,024 was 4% slower
template <class T, int kVectors>
__global__ void __launch_bounds__(kPairThreads, 2) router_forward_pair(const __grid_constant__ RouterForwardParams p) {
  static_assert(sizeof(PairScratch) >= sizeof(WarpScratch<128>));
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  PairScratch* scratch = reinterpret_cast<PairScratch*>(dynamic_smem);  // [warps]
  __shared__ std::uint32_t hist[kVectors * 64 + 1];
  begin_kernel();
  clear_histogram(hist, p.rows.E);
  await_previous();
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) >> 5, stride = static_cast<int>(gridDim.x) * (kPairThreads / 32), pairs = static_cast<int>((p.rows.T + 1) / 2);
  for (int pair = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); pair < pairs; pair += stride) {
    if (route_pair<T, kVectors>(p, pair * 2, scratch[warp], hist)) continue;
    for (int t = pair * 2; t < min(pair * 2 + 2, static_cast<int>(p.rows.T)); ++t) {
      __syncwarp();
      if (p.rows.padding != nullptr && p.rows.padding[t] != 0) {
        write_empty_row(p, t, hist);
      } else {
        route_exactly<T>(p, nullptr, t, reinterpret_cast<WarpScratch<128>&>(scratch[warp]), hist);
      }
    }
  }
  flush_histogram(p, hist);
  finish_counts(p, draw_number(p));
}

// True where the pair kernel takes the problem.
inline bool takes_pairs(const RouterForwardParams& p, int mode) { return mode == kPlain && p.rows.K <= kPairMaxK && (p.rows.E == 128 || p.rows.E == 256); }

template <class T>
void launch_pairs(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const std::int64_t needed = ((p.rows.T + 1) / 2 + kPairThreads / 32 - 1) / (kPairThreads / 32);
  const auto grid = static_cast<unsigned>(needed < 1 ? 1 : (needed < 2 * limits.num_sms ? needed : 2 * limits.num_sms));
  constexpr int kBytes = static_cast<int>(sizeof(PairScratch)) * kPairThreads / 32;
  static std::atomic<bool> done[16] = {};
  if (!done[limits.device & 15].exchange(true)) {
    cudaFuncSetAttribute(router_forward_pair<T, 2>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    cudaFuncSetAttribute(router_forward_pair<T, 4>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  }
  if (p.rows.E == 128) {
    launch_kernel(router_forward_pair<T, 2>, grid, kPairThreads, kBytes, stream, limits.compute_major >= 9, p);
  } else {
    launch_kernel(router_forward_pair<T, 4>, grid, kPairThreads, kBytes, stream, limits.compute_major >= 9, p);
  }
}

}  // namespace waybill::cuda
