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

#include "ops/router/cuda/router_device.cuh"
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
  // After ranking, `key` is reused: up to 64 sorted raw scores and ids.
  __device__ float* sorted_score() { return reinterpret_cast<float*>(key); }
  __device__ std::uint16_t* sorted_id() { return id; }
};

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

// -Inf for an expert that is no candidate; kPlain: only where x is not +Inf or NaN (the caller looks after these).
template <int kMode>
__device__ __forceinline__ float filter_value(int score, float x, float bias) {
  if constexpr (kMode == kPlain) return x;
  const float f = (kMode == kExact ? exact_score(score, x) : (score == kScoreSigmoid ? sigmoid_approx(x) : x)) + bias;
  return scalar::is_finite(f) && scalar::is_finite(x) ? f : -kInfinity;
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
  const auto value_of = [](std::uint32_t u) { return __uint_as_float(u ^ ((u >> 31) != 0 ? 0x80000000u : 0xffffffffu)); };
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

// Slots that the ranking reads: 32, 64 or all.
template <int kCandidates>
__device__ __forceinline__ int ranked_slots(int count) {
  return count <= 32 ? 32 : (count <= 64 ? 64 : kCandidates);
}

// Turns the listed logits into raw scores (x) and exact keys (0: no candidate; also from `count` to the end of the ranked slots).
template <int kCandidates>
__device__ __forceinline__ void score_candidates(const RouterRows& rows, const float* bias_smem, int count, WarpScratch<kCandidates>& scratch) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll 1
  for (int i = lane; i < ranked_slots<kCandidates>(count); i += 32) {
    std::uint32_t key = 0;
    if (i < count) {
      const float x = scratch.x[i], s = selection_score(rows.score, x);
      const float k = scalar::add(s, bias_smem == nullptr ? 0.0f : bias_smem[scratch.id[i]]);
      if (scalar::is_finite(x) && scalar::is_finite(k)) key = scalar::order_key(k);
      scratch.x[i] = s;
    }
    scratch.key[i] = key;
  }
  __syncwarp();
}

// Ranks the scored candidates and leaves the best K sorted in scratch.sorted_*; returns how many there are (<= K).
template <int kSlots, int kCandidates>
__device__ __forceinline__ int rank_candidates(int K, int count, WarpScratch<kCandidates>& scratch) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  std::uint32_t key[kSlots], rank[kSlots];
#pragma unroll
  for (int q = 0; q < kSlots; ++q) key[q] = scratch.key[lane + 32 * q], rank[q] = 0;
#pragma unroll 1
  for (int j = 0; j < count; j += 4) {
    const uint4 other = *reinterpret_cast<const uint4*>(scratch.key + j);
#pragma unroll
    for (int q = 0; q < kSlots; ++q) {
      if (other.x > key[q]) ++rank[q];
      if (other.y > key[q]) ++rank[q];
      if (other.z > key[q]) ++rank[q];
      if (other.w > key[q]) ++rank[q];
    }
  }
  // Equal keys share a rank, which shows in the sum; then ids decide.
  std::uint32_t sum = 0;
#pragma unroll
  for (int q = 0; q < kSlots; ++q) sum += lane + 32 * q < count ? rank[q] : 0u;
  if (ptx::redux_add(sum) != static_cast<std::uint32_t>(count * (count - 1) / 2)) {
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const std::uint32_t other = scratch.key[j], other_id = scratch.id[j];
#pragma unroll
      for (int q = 0; q < kSlots; ++q) rank[q] += other == key[q] && other_id < scratch.id[lane + 32 * q];
    }
  }
  float s[kSlots];
  std::uint16_t id[kSlots];
#pragma unroll
  for (int q = 0; q < kSlots; ++q) s[q] = scratch.x[lane + 32 * q], id[q] = scratch.id[lane + 32 * q];
  __syncwarp();
  int chosen = 0;
#pragma unroll
  for (int q = 0; q < kSlots; ++q) {
    const bool take = key[q] != 0 && rank[q] < static_cast<std::uint32_t>(K);
    if (take) scratch.sorted_score()[rank[q]] = s[q], scratch.sorted_id()[rank[q]] = id[q];
    chosen += __popc(__ballot_sync(ptx::kFullWarp, take));
  }
  __syncwarp();
  return chosen;
}

// Writes one row's ids and weights from the sorted scores; `chosen` of K slots have a route. Sums run over the slots in a fixed order.
// Rows whose scores underflow and parity mode go through row_weights().
template <class T>
__device__ __noinline__ void write_rare_row(const RouterForwardParams& p, int chosen, const std::uint16_t* ids, float* x, int t, float row_max, float row_sum) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const T* row = row_of<T>(p.rows, t);
  for (int k = lane; k < p.rows.K; k += 32) x[k] = k < chosen ? to_float(row[ids[k]]) : __uint_as_float(0x7fc00000u);
  __syncwarp();
  row_weights(p.rows, x, row_max, row_sum, p.weights + static_cast<std::int64_t>(t) * p.rows.K);
}

// kRare: such rows are written here; otherwise false is returned and the caller must route the row again by route_exactly().
template <class T, bool kRare, int kCandidates>
__device__ __forceinline__ bool write_row(const RouterForwardParams& p, WarpScratch<kCandidates>& scratch, int chosen, int t, float row_max, float row_sum) {
  const RouterRows& rows = p.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31, K = rows.K;
  const bool is_softmax = rows.score == kScoreSoftmax || rows.score == kScoreSoftmaxSelected;
  const bool renormalise = rows.renormalise != 0 || rows.score == kScoreSoftmaxSelected;
  const bool has0 = lane<chosen, has1 = lane + 32 < chosen, two = K> 32;
  const std::int64_t at = static_cast<std::int64_t>(t) * K + lane;
  float s0 = has0 ? scratch.sorted_score()[lane] : 0.0f, s1 = 0.0f;
  if (lane < K) store_id(p.ids, p.id_bytes, at, has0 ? scratch.sorted_id()[lane] : -1);
  if (two) {
    s1 = has1 ? scratch.sorted_score()[lane + 32] : 0.0f;
    if (lane + 32 < K) store_id(p.ids, p.id_bytes, at + 32, has1 ? scratch.sorted_id()[lane + 32] : -1);
  }
  float sum = 1.0f;
  if (is_softmax) {
    float shift = row_max;
    if (renormalise) shift = rows.bias == nullptr ? __shfl_sync(ptx::kFullWarp, s0, 0) : warp_max(fmaxf(has0 ? s0 : -kInfinity, has1 ? s1 : -kInfinity));
    s0 = has0 ? exp_difference(s0, shift) : 0.0f;
    if (two) s1 = has1 ? exp_difference(s1, shift) : 0.0f;
    sum = row_sum;
  }
  if (renormalise) {
    sum = warp_sum(s0 + s1);
    if ((!is_softmax && !(sum > 1e-12f)) || rows.epsilon > 0.0f) {  // underflow, parity; also rows without a route
      if constexpr (kRare) write_rare_row<T>(p, chosen, scratch.sorted_id(), scratch.x, t, row_max, row_sum);
      return kRare;
    }
  }
  const float factor = scalar::mul(rows.scale, ptx::rcp_approx(fmaxf(sum, 1e-30f)));  // no route: 0 / 1e-30
  if (lane < K) p.weights[at] = scalar::mul(s0, factor);
  if (two && lane + 32 < K) p.weights[at + 32] = scalar::mul(s1, factor);
  return true;
}

__device__ __forceinline__ void write_empty_row(const RouterForwardParams& p, int t) {
  if (p.ids == nullptr) return;
  for (int k = static_cast<int>(threadIdx.x) & 31; k < p.rows.K; k += 32) {
    const std::int64_t at = static_cast<std::int64_t>(t) * p.rows.K + k;
    store_id(p.ids, p.id_bytes, at, -1);
    p.weights[at] = 0.0f;
  }
}

// From the list of candidates to the outputs of row t. False: see write_row(); nothing was counted.
template <class T, bool kRare, int kCandidates>
__device__ __forceinline__ bool finish_row(const RouterForwardParams& p, const float* bias_smem, int count, WarpScratch<kCandidates>& scratch, int t,
                                           float row_max, float row_sum, std::uint32_t* hist) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  score_candidates(p.rows, bias_smem, count, scratch);
  int chosen = 0;
  if (count <= 32) {
    chosen = rank_candidates<1>(p.rows.K, count, scratch);
  } else if (count <= 64) {
    chosen = rank_candidates<2>(p.rows.K, count, scratch);
  } else {
    chosen = rank_candidates<kCandidates / 32>(p.rows.K, count, scratch);
  }
  if (p.ids != nullptr && !write_row<T, kRare>(p, scratch, chosen, t, row_max, row_sum)) return false;
  if (chosen < p.rows.K) count_short_rows(p.status, 1);
  if (lane < chosen) atomicAdd(hist + scratch.sorted_id()[lane], 1u);
  if (lane + 32 < chosen) atomicAdd(hist + scratch.sorted_id()[lane + 32], 1u);
  __syncwarp();
  return true;
}

// One row without groups by the exact way, from global memory: rows of ties, of scores that underflow, and parity mode. Out of line and
// called where nothing else is live, so that it costs the hot path no registers.
template <class T, int kCandidates>
__device__ __noinline__ void route_exactly(const RouterForwardParams& p, const float* bias_smem, int t, WarpScratch<kCandidates>& scratch,
                                           std::uint32_t* hist) {
  __syncwarp();  // the list may still be read by other lanes
  const RouterRows& rows = p.rows;
  const T* row = row_of<T>(rows, t);
  float row_max = -kInfinity, row_sum = 0.0f;
  if (rows.score == kScoreSoftmax && rows.renormalise == 0) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const auto value = [&](int e) {
      const float x = to_float(row[e]);
      return scalar::is_finite(x) && !(bias_smem != nullptr && is_masked(bias_smem[e])) ? x : -kInfinity;
    };
    for (int e = lane; e < rows.E; e += 32) row_max = fmaxf(row_max, value(e));
    row_max = warp_max(row_max);
    for (int e = lane; e < rows.E && row_max > -kInfinity; e += 32) row_sum += ptx::ex2_approx((value(e) - row_max) * 1.44269504f);
    row_sum = warp_sum(row_sum);
  }
  const int count = exact_candidates(rows, row, bias_smem, false, 0xffffffffu, scratch);
  __syncwarp();
  (void)finish_row<T, true>(p, bias_smem, count, scratch, t, row_max, row_sum, hist);
}

}  // namespace waybill::cuda
