// SPDX-License-Identifier: Apache-2.0
// Router forward, one warp per token (sm_90; the unstaged form also runs on sm_80).
//
//   logits [T, E] fp32/bf16/fp16 -> ids [T, K] int16/int32, weights [T, K] fp32, counts [E], offsets [E+1]; nothing [T, E].
//   Grid: persistent, every warp strides over rows. Long rows are staged: each warp owns a row of shared memory that a bulk copy
//   fills; it is refilled with the warp's next row as soon as the candidates have been taken out. Short rows come straight to
//   registers. Warps do not wait for each other until the end, where the last CTA turns counts into offsets.
//   Bytes: T * E * sizeof(logit) read once, T * K * (id + 4) written.
//
// Selection by narrowing: lanes hold 32 * kGroups maxima of disjoint groups of the row. A threshold that K of the maxima reach is
// reached by K logits, and hardly by more than 1.5 K of them, whatever the distribution's scale. These candidates alone get exact
// keys and are ranked by counting. Where the filter value is not the key itself (approximate sigmoid), the threshold is lowered by
// the largest possible difference, so that narrowing never changes the result. A row with more candidates than the list holds (ties)
// takes a bitwise search for the exact K-th key over the same row.
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

// Scans. Each returns with the group maxima of the lane; NaN in the result tells that the row holds a NaN or Inf.
// kFull: E is kVectors * 128, so that no vector needs a bound.

// Registers: f [kVectors][4] filter values, -Inf where excluded. x is kept for the softmax denominator only.
template <class T, int kVectors, int kMode, bool kFull>
struct HeldRow {
  float f[kVectors][4];
  float sum_max, sum;

  // One read of the row. Returns NaN where a logit is not finite.
  __device__ __forceinline__ float load(const RouterRows& rows, const T* row, const float* bias_smem, bool need_sum) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int e = v * 128 + lane * 4;
      f[v][0] = f[v][1] = f[v][2] = f[v][3] = -kInfinity;
      if (kFull || e < rows.E) load4<T, true>(row + e, f[v]);
    }
    float poison = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!kFull && v * 128 + lane * 4 >= rows.E) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) poison = __fmaf_rn(f[v][i], 0.0f, poison);
    }
    if (kMode == kPlain && __any_sync(ptx::kFullWarp, poison != poison)) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f[v][i] = scalar::is_finite(f[v][i]) ? f[v][i] : -kInfinity;
      }
    }
    if (need_sum) softmax_sum(rows, bias_smem);
    if constexpr (kMode != kPlain) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int e = v * 128 + lane * 4;
        float4 b = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (kFull || e < rows.E) b = *reinterpret_cast<const float4*>(bias_smem + e);
        f[v][0] = filter_value<kMode>(rows.score, f[v][0], b.x), f[v][1] = filter_value<kMode>(rows.score, f[v][1], b.y);
        f[v][2] = filter_value<kMode>(rows.score, f[v][2], b.z), f[v][3] = filter_value<kMode>(rows.score, f[v][3], b.w);
      }
    }
    return poison;
  }

  // Denominator over the finite, unmasked logits, which f still holds.
  __device__ __forceinline__ void softmax_sum(const RouterRows& rows, const float* bias_smem) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const auto value = [&](int v, int i) {
      const int e = v * 128 + lane * 4 + i;
      if (kMode == kPlain) return f[v][i];
      return e < rows.E && scalar::is_finite(f[v][i]) && !is_masked(bias_smem[e]) ? f[v][i] : -kInfinity;
    };
    sum_max = -kInfinity;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum_max = fmaxf(sum_max, fmaxf(fmaxf(value(v, 0), value(v, 1)), fmaxf(value(v, 2), value(v, 3))));
    sum_max = warp_max(sum_max);
    sum = 0.0f;
    if (sum_max == -kInfinity) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      sum += (exp2_of(value(v, 0)) + exp2_of(value(v, 1))) + (exp2_of(value(v, 2)) + exp2_of(value(v, 3)));
    }
    sum = warp_sum(sum);
  }
  __device__ __forceinline__ float exp2_of(float x) const { return ptx::ex2_approx((x - sum_max) * 1.44269504f); }

  __device__ __forceinline__ void group_maxima(float (&group_max)[WarpPolicy<kVectors>::kGroups]) const {
    using Policy = WarpPolicy<kVectors>;
#pragma unroll
    for (int g = 0; g < Policy::kGroups; ++g) {
      group_max[g] = -kInfinity;
#pragma unroll
      for (int v = g * Policy::kVectorsPerGroup; v < (g + 1) * Policy::kVectorsPerGroup; ++v) {
        group_max[g] = fmaxf(group_max[g], fmaxf(fmaxf(f[v][0], f[v][1]), fmaxf(f[v][2], f[v][3])));
      }
    }
  }
};

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

// Group-limited rows: drops the experts of groups that are not kept and returns a bit per vector of those kept. Each group is a
// power of two of lanes within one vector (checked by the host). groups [G] u64 in shared memory.
template <class T, int kVectors, int kMode, bool kFull>
__device__ __forceinline__ std::uint32_t keep_groups(const RouterForwardParams& p, HeldRow<T, kVectors, kMode, kFull>& s, std::uint64_t* groups) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int group_size = p.rows.E / p.num_groups, segment = group_size / 4;
  std::uint64_t composite[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float best = fmaxf(s.f[v][0], s.f[v][1]), second = fminf(s.f[v][0], s.f[v][1]);
#pragma unroll
    for (int i = 2; i < 4; ++i) {
      second = fmaxf(second, fminf(best, s.f[v][i]));
      best = fmaxf(best, s.f[v][i]);
    }
    for (int step = 1; step < segment; step <<= 1) {
      const float other_best = __shfl_xor_sync(ptx::kFullWarp, best, step), other_second = __shfl_xor_sync(ptx::kFullWarp, second, step);
      second = fmaxf(fminf(best, other_best), fmaxf(second, other_second));
      best = fmaxf(best, other_best);
    }
    const int e = v * 128 + lane * 4, group = e / group_size;
    const bool two = p.group_best == 2 && second > -kInfinity;
    const std::uint64_t count = best > -kInfinity ? (two ? 2u : 1u) : 0u;
    const float score = two ? scalar::add(best, second) : best;
    composite[v] = count == 0 ? 0u : (count << 48) | (static_cast<std::uint64_t>(scalar::order_key(score)) << 16) | static_cast<std::uint64_t>(0xffff - group);
    if (e < p.rows.E && e % group_size == 0) groups[group] = composite[v];
  }
  __syncwarp();
  int rank[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) rank[v] = 0;
  for (int g = 0; g < p.num_groups; ++g) {
    const std::uint64_t other = groups[g];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) rank[v] += other > composite[v];
  }
  std::uint32_t kept = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const bool keep = rank[v] < p.num_kept;
    kept |= static_cast<std::uint32_t>(keep) << v;
#pragma unroll
    for (int i = 0; i < 4; ++i) s.f[v][i] = keep ? s.f[v][i] : -kInfinity;
  }
  __syncwarp();
  return kept;
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

template <class T, int kCandidates>
__device__ __forceinline__ void write_row(const RouterForwardParams& p, WarpScratch<kCandidates>& scratch, int chosen, int t, float row_max, float row_sum) {
  const RouterRows& rows = p.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31, K = rows.K;
  const bool is_softmax = rows.score == kScoreSoftmax || rows.score == kScoreSoftmaxSelected;
  const bool renormalise = rows.renormalise != 0 || rows.score == kScoreSoftmaxSelected;
  const bool has0 = lane < chosen, has1 = lane + 32 < chosen, two = K > 32;
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
      write_rare_row<T>(p, chosen, scratch.sorted_id(), scratch.x, t, row_max, row_sum);
      return;
    }
  }
  const float factor = scalar::mul(rows.scale, ptx::rcp_approx(fmaxf(sum, 1e-30f)));  // no route: 0 / 1e-30
  if (lane < K) p.weights[at] = scalar::mul(s0, factor);
  if (two && lane + 32 < K) p.weights[at + 32] = scalar::mul(s1, factor);
}

__device__ __forceinline__ void write_empty_row(const RouterForwardParams& p, int t) {
  if (p.ids == nullptr) return;
  for (int k = static_cast<int>(threadIdx.x) & 31; k < p.rows.K; k += 32) {
    const std::int64_t at = static_cast<std::int64_t>(t) * p.rows.K + k;
    store_id(p.ids, p.id_bytes, at, -1);
    p.weights[at] = 0.0f;
  }
}

// From the list of candidates to the outputs of row t.
template <class T, int kCandidates>
__device__ __forceinline__ void finish_row(const RouterForwardParams& p, const float* bias_smem, int count, WarpScratch<kCandidates>& scratch, int t,
                                           float row_max, float row_sum, std::uint32_t* hist, RowCounters& counters) {
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
  counters.short_rows += chosen < p.rows.K;
  if (p.ids != nullptr) write_row<T>(p, scratch, chosen, t, row_max, row_sum);
  if (lane < chosen) atomicAdd(hist + scratch.sorted_id()[lane], 1u);
  if (lane + 32 < chosen) atomicAdd(hist + scratch.sorted_id()[lane + 32], 1u);
  __syncwarp();
}

template <class T, int kVectors, int kMode, bool kFull>
__device__ __forceinline__ void route_held_row(const RouterForwardParams& p, const float* bias_smem, int t, WarpScratch<128>& scratch, std::uint32_t* hist,
                                               RowCounters& counters) {
  const RouterRows& rows = p.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const bool need_sum = rows.score == kScoreSoftmax && rows.renormalise == 0;
  HeldRow<T, kVectors, kMode, kFull> s;
  const float poison = s.load(rows, row_of<T>(rows, t), bias_smem, need_sum);
  counters.nonfinite += __any_sync(ptx::kFullWarp, poison != poison);
  std::uint32_t kept = 0xffffffffu;
  const bool is_grouped = kMode == kExact && p.num_kept < p.num_groups;
  if constexpr (kMode == kExact) {
    if (is_grouped) kept = keep_groups(p, s, reinterpret_cast<std::uint64_t*>(scratch.key));
  }
  float group_max[WarpPolicy<kVectors>::kGroups];
  s.group_maxima(group_max);
  const float threshold = fmaxf(lowered_threshold(kMode, rows.score, group_threshold(group_max, rows.K)), -3.402823466e38f);
  int mine = 0, count = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) mine += s.f[v][i] >= threshold;
  }
  int slot = lane_prefix(mine, count);
  const float* bias = kMode == kPlain ? nullptr : bias_smem;
  if (count > 128) {
    count = exact_candidates(rows, row_of<T>(rows, t), bias, is_grouped, kept, scratch);
  } else if (mine != 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (s.f[v][i] >= threshold) {
          scratch.x[slot] = s.f[v][i], scratch.id[slot] = static_cast<std::uint16_t>(v * 128 + lane * 4 + i);
          ++slot;
        }
      }
    }
  }
  __syncwarp();
  if constexpr (kMode != kPlain) {  // the list holds filter values: fetch the logits
    const T* row = row_of<T>(rows, t);
    for (int i = lane; i < count; i += 32) scratch.x[i] = to_float(row[scratch.id[i]]);
    __syncwarp();
  }
  finish_row<T>(p, bias, count, scratch, t, need_sum ? s.sum_max : 0.0f, need_sum ? s.sum : 1.0f, hist, counters);
}

// Shared memory of a CTA: histogram [E], then the bias [E] where the mode has one. Ends with a barrier.
template <int kMode>
__device__ __forceinline__ void prepare_cta(const RouterRows& rows, std::uint32_t* hist, float* bias_smem) {
  clear_histogram(hist, rows.E);
  if constexpr (kMode != kPlain) {
#pragma unroll 4
    for (int e = static_cast<int>(threadIdx.x); e < rows.E; e += static_cast<int>(blockDim.x)) bias_smem[e] = effective_bias(rows, e);
  }
  __syncthreads();
}
// Elements rounded up so that the next part of shared memory is 16-byte aligned.
__host__ __device__ constexpr int padded_experts(int E) { return (E + 3) / 4 * 4; }
__host__ __device__ inline std::size_t cta_bytes(int E, int mode) { return static_cast<std::size_t>(padded_experts(E)) * (mode == kPlain ? 4 : 8); }

// Threads of a CTA and CTAs an SM must hold: as many as the registers allow without spills.
template <int kVectors, int kMode>
inline constexpr int kUnstagedThreads = kMode == kExact ? (kVectors <= 2 ? 320 : 256) : (kVectors == 8 ? 256 : (kMode == kBiased || kVectors == 4 ? 448 : 512));
template <int kVectors, int kMode>
inline constexpr int kUnstagedBlocks = 2;

template <class T, int kVectors, int kMode, bool kFull>
__global__ void __launch_bounds__(kUnstagedThreads<kVectors, kMode>, kUnstagedBlocks<kVectors, kMode>)
    router_forward_warp(const __grid_constant__ RouterForwardParams p) {
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  constexpr int kThreads = kUnstagedThreads<kVectors, kMode>;
  __shared__ WarpScratch<128> scratch[kThreads / 32];
  std::uint32_t* hist = reinterpret_cast<std::uint32_t*>(dynamic_smem);
  float* bias_smem = reinterpret_cast<float*>(hist + padded_experts(p.rows.E));
  prepare_cta<kMode>(p.rows, hist, bias_smem);
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int num_warps = static_cast<int>(gridDim.x) * (kThreads / 32), T_rows = static_cast<int>(p.rows.T);
  RowCounters counters;
  // Warp w of all CTAs before warp w + 1: rows spread evenly over the SMs whatever T is.
  for (int t = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); t < T_rows; t += num_warps) {
    if (p.rows.padding != nullptr && p.rows.padding[t] != 0) {
      write_empty_row(p, t);
      continue;
    }
    route_held_row<T, kVectors, kMode, kFull>(p, bias_smem, t, scratch[warp], hist, counters);
  }
  add_row_counters(p.status, counters);
  flush_histogram(p, hist);
  finish_counts(p);
}

}  // namespace waybill::cuda
