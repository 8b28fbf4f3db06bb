// SPDX-License-Identifier: Apache-2.0
// Selection by one warp, shared by the router's warp kernels.
//
// Lanes hold 32 * kGroups maxima of disjoint groups of the row. A threshold that K of the maxima reach is reached by K logits, and
// hardly by more than 1.5 K of them, whatever the distribution's scale. These candidates alone get exact keys and are ranked by
// counting. Where the filter value is not the key itself (approximate sigmoid), the threshold is lowered by the largest possible
// difference, so that narrowing never changes the result. A row with more candidates than the list holds (ties) takes a bitwise search
// for the exact K-th key over the same row.
//
// Code size matters as much as instruction count here (every warp is at another place): rare paths are out of line.
#pragma once

#include "ops/router/cuda/router_counts.cuh"
#include "ops/router/cuda/tuning.h"

namespace waybill::cuda {

// kPlain: no bias, no mask, no groups: the logit orders like the score. kBiased: bias or mask, filter by an approximate key (sigmoid)
// or the key (softmax). kExact: exact keys for every expert (groups, sqrt-softplus with bias).
enum WarpMode : int { kPlain = 0, kBiased = 1, kExact = 2 };

// kHold: filter values stay in registers (unstaged). Otherwise the row is in shared memory, and so are its vectors' maxima where
// there are few enough to keep them in registers.
template <int kVectors>
struct WarpPolicy {
  static constexpr bool kHold = kVectors <= 8;
  static constexpr bool kKeepMaxima = !kHold && kVectors <= 32;
  static constexpr int kGroups = kVectors == 18 ? 3 : (kVectors == 64 ? 8 : (kVectors == 8 ? 4 : kVectors));
  static constexpr int kVectorsPerGroup = kVectors / kGroups;
  static constexpr int kCandidates = kHold ? 128 : 96;
  static_assert(kVectors % kGroups == 0);
};

template <int kCandidates>
struct alignas(16) WarpScratch {
  std::uint32_t key[kCandidates];
  float x[kCandidates];
  std::uint16_t id[kCandidates];
  float row_max, row_sum;  // softmax denominator over all experts, where the weights need it (kept here, not in registers)
  // After ranking, `key` is reused: up to 64 sorted raw scores and ids.
  __device__ float* sorted_score() { return reinterpret_cast<float*>(key); }
  __device__ std::uint16_t* sorted_id() { return id; }
};

// Seen by the warp after its next __syncwarp().
template <int kCandidates>
__device__ __forceinline__ void store_sum(WarpScratch<kCandidates>& scratch, float row_max, float row_sum) {
  if ((threadIdx.x & 31) == 0) scratch.row_max = row_max, scratch.row_sum = row_sum;
}

// T fits 31 bits (the host checks), offsets do not.
template <class T>
__device__ __forceinline__ const T* row_of(const RouterRows& rows, int t) {
  return static_cast<const T*>(rows.logits) + t * rows.row_stride;
}

// How far below the threshold an expert can lie whose exact key still reaches that of an expert above it. Plain rows: x order
// against score order (errors and saturation of the scores: 3 and 2 ulp); biased: filter error on both sides.
__device__ __forceinline__ float lowered_threshold(int mode, int score, float t) {
  constexpr float kUlp = 1.1920929e-7f;  // 2^-23
  if (mode == kExact || score == kScoreSoftmax || score == kScoreSoftmaxSelected) return t;
  if (mode == kBiased) return t - 2.0f * (1.5e-6f + 2.0f * kUlp * fabsf(t));
  if (score == kScoreSigmoid) {
    if (t < -86.0f) return -3.402823466e38f;  // subnormal scores: ties far apart, all candidates
    if (t > 13.0f) return 12.0f;
    return t - (16.0f * kUlp * (t > 0.0f ? 1.001f * __expf(t) : 1.0f) + 2.0f * kUlp * fabsf(t));
  }
  return t < -172.0f ? -3.402823466e38f : t - 32.0f * kUlp * (1.0f + fabsf(t));
}

// selection_score with the rare sqrt-softplus out of line.
__device__ __noinline__ inline float sqrt_softplus_score(float x) { return scalar::sqrt_softplus(x); }
__device__ __forceinline__ float exact_score(int score, float x) {
  if (score == kScoreSigmoid) return scalar::sigmoid(x);
  return score == kScoreSqrtSoftplus ? sqrt_softplus_score(x) : x;
}

// sigmoid to 1e-6 absolute.
__device__ __forceinline__ float sigmoid_approx(float x) { return ptx::rcp_approx(1.0f + ptx::ex2_approx(scalar::mul(x, -1.44269504f))); }

// Two sigmoids plus biases with one reciprocal. Neither (1 + e^-x) (1 + e^-y) nor its reciprocal may leave the normal range: -x - y <= 85.
__device__ __forceinline__ void add_sigmoids(float& x, float& y, float bias_x, float bias_y) {
  const float of_x = 1.0f + ptx::ex2_approx(scalar::mul(x, -1.44269504f)), of_y = 1.0f + ptx::ex2_approx(scalar::mul(y, -1.44269504f));
  const float inverse = ptx::rcp_approx(of_x * of_y);
  x = __fmaf_rn(inverse, of_y, bias_x), y = __fmaf_rn(inverse, of_x, bias_y);
}

// Filter values of four experts in place: -Inf for one that is no candidate; kPlain: only where x is not +Inf or NaN (the caller looks after
// these).
template <int kMode>
__device__ __forceinline__ void filter_values(int score, float (&x)[4], const float4& bias) {
  if constexpr (kMode != kPlain) {
    const float b[4] = {bias.x, bias.y, bias.z, bias.w}, given[4] = {x[0], x[1], x[2], x[3]};
    if (kMode == kExact) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = exact_score(score, x[i]);
    } else if (score == kScoreSigmoid) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = sigmoid_approx(x[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float f = x[i] + b[i];
      x[i] = scalar::is_finite(f) && scalar::is_finite(given[i]) ? f : -kInfinity;
    }
  }
}

// Largest threshold found by bisection that at least K of the warp's group maxima reach, preferably with few more; -FLT_MAX where
// fewer than K groups have a candidate. Warp uniform.
template <int kGroups>
__device__ __forceinline__ float group_threshold(const float (&group_max)[kGroups], int K) {
  constexpr std::uint32_t kMinusInfinity = 0x007fffffu;  // order_key(-Inf)
  float lane_max = group_max[0];
#pragma unroll
  for (int g = 1; g < kGroups; ++g) lane_max = fmaxf(lane_max, group_max[g]);
  const std::uint32_t lane_key = scalar::order_key(lane_max);
  const std::uint32_t high_key = ptx::redux_max(lane_key);
  const bool lane_has = lane_key > kMinusInfinity;
  std::uint32_t low_key = ptx::redux_min(lane_has ? lane_key : 0xffffffffu);
  if (__popc(__ballot_sync(ptx::kFullWarp, lane_has)) < K) {
    int count = 0;
    std::uint32_t smallest = 0xffffffffu;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const std::uint32_t key = scalar::order_key(group_max[g]);
      count += __popc(__ballot_sync(ptx::kFullWarp, key > kMinusInfinity));
      smallest = min(smallest, key > kMinusInfinity ? key : 0xffffffffu);
    }
    if (count < K) return -3.402823466e38f;
    low_key = ptx::redux_min(smallest);
  }
  float low = value_of(low_key), high = value_of(high_key);
  const int enough = K + (K < 16 ? K / 2 : 4);
  for (int round = 0; round < 24; ++round) {
    const float middle = 0.5f * low + 0.5f * high;
    if (!(middle > low && middle < high)) break;
    int count = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) count += __popc(__ballot_sync(ptx::kFullWarp, group_max[g] >= middle));
    if (count >= K) {
      low = middle;
      if (count <= enough) break;
    } else {
      high = middle;
    }
  }
  return low;
}

// Exclusive prefix over the lanes of `mine` (below 64) and the total.
__device__ __forceinline__ int lane_prefix(int mine, int& total) {
  int before = 0;
  total = 0;
  const unsigned below = ptx::lanemask_lt();
#pragma unroll
  for (int bit = 0; bit < 3; ++bit) {
    const unsigned lanes = __ballot_sync(ptx::kFullWarp, ((mine >> bit) & 1) != 0);
    before += __popc(lanes & below) << bit;
    total += __popc(lanes) << bit;
  }
  if (__any_sync(ptx::kFullWarp, mine > 7)) {
    for (int bit = 3; bit < 9; ++bit) {
      const unsigned lanes = __ballot_sync(ptx::kFullWarp, ((mine >> bit) & 1) != 0);
      before += __popc(lanes & below) << bit;
      total += __popc(lanes) << bit;
    }
  }
  return before;
}

// Appends entries of one lane from slot `slot` on; entries beyond the capacity are not stored.
template <int kCandidates>
__device__ __forceinline__ void put_candidate(WarpScratch<kCandidates>& scratch, int& slot, bool take, int id, float x) {
  if (take && slot < kCandidates) scratch.x[slot] = x, scratch.id[slot] = static_cast<std::uint16_t>(id);
  slot += take;
}

// The exact way, for rows of ties: finds the K-th largest key bit by bit, then lists what lies above it and the first ties in index
// order. `kept`: bit v of a lane tells whether its experts in vector v are in a kept group (grouped rows). Returns the list's length.
template <class T, int kCandidates>
__device__ __noinline__ int exact_candidates(const RouterRows& rows, const T* row, const float* bias_smem, bool is_grouped, std::uint32_t kept,
                                             WarpScratch<kCandidates>& scratch) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int num_vectors = (rows.E + 127) / 128;
  const auto keys_of = [&](int v, float(&x)[4], std::uint32_t(&key)[4]) {
    const int e = v * 128 + lane * 4;
    const bool inside = e < rows.E && (!is_grouped || ((kept >> v) & 1u) != 0);
    if (inside) load4<T, false>(row + e, x);
    for (int i = 0; i < 4; ++i) key[i] = inside ? exact_key(rows.score, x[i], bias_smem == nullptr ? 0.0f : bias_smem[e + i]) : 0u;
  };
  const auto count_from = [&](std::uint32_t lowest) {
    std::uint32_t count = 0;
    for (int v = 0; v < num_vectors; ++v) {
      float x[4];
      std::uint32_t key[4];
      keys_of(v, x, key);
      for (int i = 0; i < 4; ++i) count += key[i] >= lowest;
    }
    return static_cast<int>(ptx::redux_add(count));
  };
  std::uint32_t cut = 0;  // the largest key that at least K keys reach
  for (int bit = 31; bit >= 0; --bit) {
    const std::uint32_t trial = cut | (1u << bit);
    const int count = count_from(trial);
    if (count >= rows.K) cut = trial;
    if (count == rows.K) break;
  }
  cut = max(cut, 1u);  // fewer than K candidates: all of them
  int ties_left = rows.K - (cut == 0xffffffffu ? 0 : count_from(cut + 1));
  int count = 0;
  for (int v = 0; v < num_vectors; ++v) {
    float x[4];
    std::uint32_t key[4];
    keys_of(v, x, key);
    int mine = 0;
    for (int i = 0; i < 4; ++i) mine += key[i] == cut;
    int before = 0, total = 0;
    for (int bit = 0; bit < 3; ++bit) {
      const unsigned lanes = __ballot_sync(ptx::kFullWarp, ((mine >> bit) & 1) != 0);
      before += __popc(lanes & ptx::lanemask_lt()) << bit;
      total += __popc(lanes) << bit;
    }
    bool take[4];
    int taken = 0, total_taken = 0;
    for (int i = 0; i < 4; ++i) {
      const bool is_tie = key[i] == cut;
      take[i] = key[i] > cut || (is_tie && before < ties_left);
      before += is_tie;
      taken += take[i];
    }
    int slot = count + lane_prefix(taken, total_taken);
    for (int i = 0; i < 4; ++i) put_candidate(scratch, slot, take[i], v * 128 + lane * 4 + i, x[i]);
    count += total_taken;
    ties_left = max(ties_left - total, 0);
  }
  return count;
}

}  // namespace waybill::cuda
