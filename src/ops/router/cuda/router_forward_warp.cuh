// SPDX-License-Identifier: Apache-2.0
// Router forward, one warp per token (sm_90; the unstaged form also runs on sm_80).
//
//   logits [T, E] fp32/bf16/fp16 -> ids [T, K] int16/int32, weights [T, K] fp32, counts [E], offsets [E+1]; nothing [T, E].
//   Grid: persistent, every warp strides over rows. Staged form: each warp owns a ring of row buffers in shared memory that bulk
//   copies fill ahead; unstaged form: rows come straight to registers. Warps do not wait for each other until the end, where the last
//   CTA turns counts into offsets. Bytes: T * E * sizeof(logit) read once, T * K * (id + 4) written.
//
// Selection by narrowing: lanes hold 32 * kGroups maxima of disjoint groups of the row. A threshold that K of the maxima reach is
// reached by K logits, and hardly by more than 1.5 K of them, whatever the distribution's scale. These candidates alone get exact
// keys and are ranked by counting. Where the filter value is not the key itself (approximate sigmoid), the threshold is lowered by
// the largest possible difference, so that narrowing never changes the result. A row with more than kMaxCandidates candidates (ties)
// takes a bitwise search for the exact K-th key over the same row.
#pragma once

#include "ops/router/cuda/router_device.cuh"
#include "ops/router/cuda/tuning.h"

namespace waybill::cuda {

// kPlain: no bias, no mask, no groups: the logit orders like the score. kBiased: bias or mask, filter by an approximate key (sigmoid)
// or the key (softmax). kExact: exact keys for every expert (groups, sqrt-softplus with bias).
enum WarpMode : int { kPlain = 0, kBiased = 1, kExact = 2 };

template <int kVectors, int kMode>
struct WarpPolicy {
  static constexpr bool kHold = kVectors <= 8;                        // filter values stay in registers
  static constexpr bool kKeepMaxima = kVectors > 8 && kVectors <= 32;  // the maximum of each vector does; beyond, rows are read twice
  static constexpr int kChunk = kVectors <= 8 ? kVectors : (kVectors == 18 ? (kMode == kPlain ? 6 : 3) : 4);
  static constexpr int kGroups = kVectors == 18 ? 3 : (kVectors == 64 ? 8 : (kVectors == 8 ? 4 : kVectors));
  static constexpr int kVectorsPerGroup = kVectors / kGroups;
  static_assert(kVectors % kGroups == 0 && kVectors % kChunk == 0);
};

struct alignas(16) WarpScratch {
  std::uint32_t key[router_tuning::kMaxCandidates];
  std::uint32_t id[router_tuning::kMaxCandidates];
  float x[router_tuning::kMaxCandidates];
  // After ranking, `key` is reused: K sorted logits, then K sorted ids.
  __device__ float* sorted_x() { return reinterpret_cast<float*>(key); }
  __device__ std::int32_t* sorted_id() { return reinterpret_cast<std::int32_t*>(key + router_tuning::kMaxWarpK); }
};

// How far below the threshold an expert can lie whose exact key still reaches that of an expert above it. Plain rows: x order
// against score order (errors and saturation of the scores: 3 and 2 ulp); biased: filter error on both sides.
__device__ __forceinline__ float lowered_threshold(int mode, int score, float t) {
  constexpr float kUlp = 1.1920929e-7f;  // 2^-23
  if (mode == kExact || score == kScoreSoftmax || score == kScoreSoftmaxSelected) return t;
  if (mode == kBiased) return t - 2.0f * (1.5e-6f + 2.0f * kUlp * fabsf(t));
  if (score == kScoreSigmoid) {
    if (t > 13.0f) return 12.0f;
    return t - (16.0f * kUlp * (t > 0.0f ? 1.001f * __expf(t) : 1.0f) + 2.0f * kUlp * fabsf(t));
  }
  return t - 32.0f * kUlp * (1.0f + fabsf(t));
}

// sigmoid to 1e-6 absolute.
__device__ __forceinline__ float sigmoid_approx(float x) { return ptx::rcp_approx(1.0f + ptx::ex2_approx(scalar::mul(x, -1.44269504f))); }

template <int kMode>
__device__ __forceinline__ float filter_value(int score, float x, float bias) {
  if constexpr (kMode == kPlain) return x;
  if constexpr (kMode == kBiased) {
    const float f = (score == kScoreSigmoid ? sigmoid_approx(x) : x) + bias;
    return f < kInfinity ? f : -kInfinity;  // masked (NaN) or overflowed: excluded
  }
  return scalar::add(selection_score(score, x), bias);
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
  const int enough = K + (K >> 3) + 1;
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

// What a scan of the row leaves in a lane's registers.
template <int kVectors, int kMode>
struct LaneScan {
  static constexpr int kHeld = WarpPolicy<kVectors, kMode>::kHold ? kVectors : 1;
  static constexpr int kMaxima = WarpPolicy<kVectors, kMode>::kKeepMaxima ? kVectors : 1;
  float f[kHeld][4];                                 // held form: filter values, -Inf where excluded
  float vector_max[kMaxima];                         // otherwise: the largest of each vector of four
  float group_max[WarpPolicy<kVectors, kMode>::kGroups];
  float sum_max, sum;                                // online softmax denominator, when asked for
  bool has_nonfinite;
};

// Reads the row once. kSanitise: entries that are not finite are excluded (only after a first scan has found some).
template <class T, int kVectors, int kMode, bool kStaged, bool kSanitise>
__device__ __forceinline__ void scan_row(const RouterRows& rows, const T* row, const float* bias_smem, bool need_sum, LaneScan<kVectors, kMode>& s) {
  using Policy = WarpPolicy<kVectors, kMode>;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float poison = 0.0f;  // NaN once a logit is not finite
  s.sum = 0.0f, s.sum_max = -kInfinity;
#pragma unroll
  for (int g = 0; g < Policy::kGroups; ++g) s.group_max[g] = -kInfinity;
#pragma unroll
  for (int chunk = 0; chunk < kVectors; chunk += Policy::kChunk) {
    float x[Policy::kChunk][4];
    if constexpr (kMode == kBiased && kVectors > 8) __syncwarp();  // keeps the next chunk's loads out of this one's registers
#pragma unroll
    for (int c = 0; c < Policy::kChunk; ++c) {
      const int e = (chunk + c) * 128 + lane * 4;
      if (e < rows.E) {
        load4<T, !kStaged && !kSanitise>(row + e, x[c]);
      } else {
        x[c][0] = x[c][1] = x[c][2] = x[c][3] = -kInfinity;
      }
    }
    float chunk_max = -kInfinity;
#pragma unroll
    for (int c = 0; c < Policy::kChunk; ++c) {
      const int v = chunk + c;
      const int e = v * 128 + lane * 4;
      float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if constexpr (kMode != kPlain) {
        if (e < rows.E) bias = *reinterpret_cast<const float4*>(bias_smem + e);
      }
      const float b[4] = {bias.x, bias.y, bias.z, bias.w};
      float f[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSanitise) {
          x[c][i] = scalar::is_finite(x[c][i]) ? x[c][i] : -kInfinity;
        } else {
          if (e < rows.E) poison = __fmaf_rn(x[c][i], 0.0f, poison);
        }
        f[i] = filter_value<kMode>(rows.score, x[c][i], b[i]);
        if constexpr (kSanitise) f[i] = x[c][i] == -kInfinity ? -kInfinity : f[i];
        if constexpr (kMode == kExact) f[i] = scalar::is_finite(f[i]) && scalar::is_finite(x[c][i]) ? f[i] : -kInfinity;
        if constexpr (kMode != kPlain) x[c][i] = is_masked(b[i]) ? -kInfinity : x[c][i];  // for the sum
      }
      const float largest = fmaxf(fmaxf(f[0], f[1]), fmaxf(f[2], f[3]));
      if constexpr (Policy::kHold) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s.f[v][i] = f[i];
      } else if constexpr (Policy::kKeepMaxima) {
        s.vector_max[v] = largest;
      }
      s.group_max[v / Policy::kVectorsPerGroup] = fmaxf(s.group_max[v / Policy::kVectorsPerGroup], largest);
      if constexpr (kMode == kPlain) chunk_max = fmaxf(chunk_max, largest);
      if constexpr (kMode != kPlain) chunk_max = fmaxf(chunk_max, fmaxf(fmaxf(x[c][0], x[c][1]), fmaxf(x[c][2], x[c][3])));
    }
    if (need_sum) {
      constexpr float kLog2E = 1.44269504f;
      const float next = fmaxf(s.sum_max, chunk_max);
      if (next > -kInfinity) {
        float part = 0.0f;
#pragma unroll
        for (int c = 0; c < Policy::kChunk; ++c) {
          part += (ptx::ex2_approx((x[c][0] - next) * kLog2E) + ptx::ex2_approx((x[c][1] - next) * kLog2E)) +
                  (ptx::ex2_approx((x[c][2] - next) * kLog2E) + ptx::ex2_approx((x[c][3] - next) * kLog2E));
        }
        s.sum = s.sum * ptx::ex2_approx((s.sum_max - next) * kLog2E) + part;
        s.sum_max = next;
      }
    }
  }
  s.has_nonfinite = poison != poison;
}

// Group-limited rows: drops the experts of groups that are not kept and returns a bit per vector of those kept. Each group is a
// power of two of lanes within one vector (checked by the host). groups [G] u64 in shared memory.
template <int kVectors, int kMode>
__device__ __forceinline__ std::uint32_t keep_groups(const RouterForwardParams& p, LaneScan<kVectors, kMode>& s, std::uint64_t* groups) {
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

// Appends the lanes with `take` to the list; `count` may pass the capacity, entries beyond it are not stored.
__device__ __forceinline__ void push_candidate(WarpScratch& scratch, int& count, bool take, int id, float x) {
  const unsigned takers = __ballot_sync(ptx::kFullWarp, take);
  if (takers == 0) return;
  const int slot = count + __popc(takers & ptx::lanemask_lt());
  if (take && slot < router_tuning::kMaxCandidates) scratch.id[slot] = static_cast<std::uint32_t>(id), scratch.x[slot] = x;
  count += __popc(takers);
}

template <class T, int kVectors, int kMode, bool kStaged>
__device__ __forceinline__ int collect_candidates(const RouterRows& rows, const T* row, const float* bias_smem, const LaneScan<kVectors, kMode>& s, float threshold,
                                                  WarpScratch& scratch) {
  using Policy = WarpPolicy<kVectors, kMode>;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int count = 0;
  if constexpr (Policy::kHold) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) push_candidate(scratch, count, s.f[v][i] >= threshold, v * 128 + lane * 4 + i, s.f[v][i]);
    }
  } else if constexpr (Policy::kKeepMaxima) {
    std::uint32_t mask = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) mask |= s.vector_max[v] >= threshold ? 1u << v : 0u;
    while (__any_sync(ptx::kFullWarp, mask != 0)) {
      const bool active = mask != 0;
      const int e = active ? (__ffs(static_cast<int>(mask)) - 1) * 128 + lane * 4 : 0;
      mask &= mask - 1;
      float x[4];
      load4<T, false>(row + e, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float bias = kMode == kPlain ? 0.0f : bias_smem[e + i];
        push_candidate(scratch, count, active && filter_value<kMode>(rows.score, x[i], bias) >= threshold, e + i, x[i]);
      }
    }
  } else {
    for (int v = 0; v * 128 < rows.E; ++v) {
      const int e = v * 128 + lane * 4;
      float x[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
      if (e < rows.E) load4<T, false>(row + e, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float bias = kMode == kPlain || e >= rows.E ? 0.0f : bias_smem[e + i];
        push_candidate(scratch, count, filter_value<kMode>(rows.score, x[i], bias) >= threshold, e + i, x[i]);
      }
    }
  }
  return count;
}

// The exact way, for rows of ties: finds the K-th largest key bit by bit, then lists what lies above it and the first ties in index
// order. `kept`: bit v of a lane tells whether its experts in vector v are in a kept group (grouped rows). Returns the list's length.
template <class T>
__device__ __noinline__ int exact_candidates(const RouterRows& rows, const T* row, const float* bias_smem, bool is_grouped, std::uint32_t kept,
                                             WarpScratch& scratch) {
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
    for (int i = 0; i < 4; ++i) {
      const bool is_tie = key[i] == cut;
      push_candidate(scratch, count, key[i] > cut || (is_tie && before < ties_left), v * 128 + lane * 4 + i, x[i]);
      before += is_tie;
    }
    ties_left = max(ties_left - total, 0);
  }
  return count;
}

// Ranks the listed candidates and leaves the best K sorted in scratch.sorted_*; returns how many there are (<= K).
template <int kSlots>
__device__ __forceinline__ int rank_candidates(const RouterRows& rows, const float* bias_smem, int count, WarpScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  std::uint32_t key[kSlots], id[kSlots], rank[kSlots];
  float x[kSlots];
#pragma unroll
  for (int q = 0; q < kSlots; ++q) {
    const int i = lane + 32 * q;
    key[q] = 0, rank[q] = 0, id[q] = 0, x[q] = 0.0f;
    if (i < count) {
      id[q] = scratch.id[i], x[q] = scratch.x[i];
      key[q] = exact_key(rows.score, x[q], bias_smem == nullptr ? 0.0f : bias_smem[id[q]]);
    }
    scratch.key[i] = key[q];
  }
  __syncwarp();
  for (int j = 0; j < count; j += 4) {
    const uint4 other = *reinterpret_cast<const uint4*>(scratch.key + j);
#pragma unroll
    for (int q = 0; q < kSlots; ++q) rank[q] += (other.x > key[q]) + (other.y > key[q]) + (other.z > key[q]) + (other.w > key[q]);
  }
  // Equal keys share a rank, which shows in the sum; then ids decide.
  std::uint32_t sum = 0;
#pragma unroll
  for (int q = 0; q < kSlots; ++q) sum += lane + 32 * q < count ? rank[q] : 0u;
  if (ptx::redux_add(sum) != static_cast<std::uint32_t>(count * (count - 1) / 2)) {
    for (int j = 0; j < count; ++j) {
      const std::uint32_t other = scratch.key[j], other_id = scratch.id[j];
#pragma unroll
      for (int q = 0; q < kSlots; ++q) rank[q] += other == key[q] && other_id < id[q];
    }
  }
  __syncwarp();
  int chosen = 0;
#pragma unroll
  for (int q = 0; q < kSlots; ++q) {
    const bool take = key[q] != 0 && rank[q] < static_cast<std::uint32_t>(rows.K);
    if (take) scratch.sorted_x()[rank[q]] = x[q], scratch.sorted_id()[rank[q]] = static_cast<std::int32_t>(id[q]);
    chosen += __popc(__ballot_sync(ptx::kFullWarp, take));
  }
  for (int k = chosen + lane; k < rows.K; k += 32) scratch.sorted_x()[k] = __uint_as_float(0x7fc00000u), scratch.sorted_id()[k] = -1;
  __syncwarp();
  return chosen;
}

__device__ __forceinline__ void write_empty_row(const RouterForwardParams& p, std::int64_t t) {
  if (p.ids == nullptr) return;
  for (int k = static_cast<int>(threadIdx.x) & 31; k < p.rows.K; k += 32) {
    store_id(p.ids, p.id_bytes, t * p.rows.K + k, -1);
    p.weights[t * p.rows.K + k] = 0.0f;
  }
}

template <class T, int kVectors, int kMode, bool kStaged>
__device__ __forceinline__ void route_row(const RouterForwardParams& p, const T* row, const float* bias_smem, std::int64_t t, WarpScratch& scratch,
                                          RowCounters& counters) {
  const RouterRows& rows = p.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const bool need_sum = rows.score == kScoreSoftmax && rows.renormalise == 0;
  LaneScan<kVectors, kMode> s;
  scan_row<T, kVectors, kMode, kStaged, false>(rows, row, bias_smem, need_sum, s);
  if (__any_sync(ptx::kFullWarp, s.has_nonfinite)) {
    ++counters.nonfinite;
    scan_row<T, kVectors, kMode, kStaged, true>(rows, row, bias_smem, need_sum, s);
  }
  std::uint32_t kept = 0xffffffffu;
  const bool is_grouped = kMode == kExact && p.num_kept < p.num_groups;
  if constexpr (kMode == kExact && WarpPolicy<kVectors, kMode>::kHold) {
    if (is_grouped) {
      kept = keep_groups(p, s, reinterpret_cast<std::uint64_t*>(scratch.key));
#pragma unroll
      for (int g = 0; g < WarpPolicy<kVectors, kMode>::kGroups; ++g) s.group_max[g] = -kInfinity;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float& m = s.group_max[v / WarpPolicy<kVectors, kMode>::kVectorsPerGroup];
        m = fmaxf(m, fmaxf(fmaxf(s.f[v][0], s.f[v][1]), fmaxf(s.f[v][2], s.f[v][3])));
      }
    }
  }
  const float threshold = fmaxf(lowered_threshold(kMode, rows.score, group_threshold(s.group_max, rows.K)), -3.402823466e38f);
  int count = collect_candidates<T, kVectors, kMode, kStaged>(rows, row, bias_smem, s, threshold, scratch);
  const float* bias = kMode == kPlain ? nullptr : bias_smem;
  if (count > router_tuning::kMaxCandidates) count = exact_candidates(rows, row, bias, is_grouped, kept, scratch);
  __syncwarp();
  if constexpr (kMode != kPlain && WarpPolicy<kVectors, kMode>::kHold) {  // the list holds filter values: fetch the logits
    for (int i = lane; i < count; i += 32) scratch.x[i] = to_float(row[scratch.id[i]]);
    __syncwarp();
  }
  int chosen = 0;
  if (count <= 32) {
    chosen = rank_candidates<1>(rows, bias, count, scratch);
  } else if (count <= 64) {
    chosen = rank_candidates<2>(rows, bias, count, scratch);
  } else {
    chosen = rank_candidates<4>(rows, bias, count, scratch);
  }
  counters.short_rows += chosen < rows.K;
  if (p.ids != nullptr) {
    float row_max = 0.0f, row_sum = 1.0f;
    if (need_sum) {
      row_max = warp_max(s.sum_max);
      row_sum = warp_sum(s.sum_max == -kInfinity ? 0.0f : s.sum * ptx::ex2_approx((s.sum_max - row_max) * 1.44269504f));
    }
    for (int k = lane; k < rows.K; k += 32) store_id(p.ids, p.id_bytes, t * rows.K + k, scratch.sorted_id()[k]);
    row_weights(rows, scratch.sorted_x(), row_max, row_sum, [&](int k, float w) { p.weights[t * rows.K + k] = w; });
  }
  if (p.scratch.counts != nullptr) {
    for (int k = lane; k < chosen; k += 32) ptx::red_add(p.scratch.counts + scratch.sorted_id()[k], 1u);
  }
  __syncwarp();
}

template <class T, int kVectors>
__device__ __forceinline__ void load_bias(const RouterRows& rows, float* bias_smem) {
  for (int e = static_cast<int>(threadIdx.x); e < rows.E; e += static_cast<int>(blockDim.x)) bias_smem[e] = effective_bias(rows, e);
  __syncthreads();
}

inline constexpr int kUnstagedThreads = 256;
template <int kVectors>
inline constexpr int kStagedMaxThreads = kVectors > 18 ? 256 : 384;
// CTAs an SM must hold: as many as the registers allow without spills.
template <int kVectors, int kMode>
inline constexpr int kUnstagedBlocks = kVectors <= 2 ? 4 : (kVectors == 4 ? (kMode == kPlain ? 4 : 3) : (kVectors == 8 && kMode == kPlain ? 3 : 2));

template <class T, int kVectors, int kMode>
__global__ void __launch_bounds__(kUnstagedThreads, kUnstagedBlocks<kVectors, kMode>) router_forward_warp(const __grid_constant__ RouterForwardParams p) {
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  __shared__ WarpScratch scratch[kUnstagedThreads / 32];
  float* bias_smem = reinterpret_cast<float*>(dynamic_smem);
  if constexpr (kMode != kPlain) load_bias<T, kVectors>(p.rows, bias_smem);
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * (kUnstagedThreads / 32);
  RowCounters counters;
  // Neighbouring warps of the grid take neighbouring rows.
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * (kUnstagedThreads / 32) + warp; t < p.rows.T; t += num_warps) {
    if (p.rows.padding != nullptr && p.rows.padding[t] != 0) {
      write_empty_row(p, t);
      continue;
    }
    route_row<T, kVectors, kMode, false>(p, static_cast<const T*>(p.rows.logits) + t * p.rows.row_stride, bias_smem, t, scratch[warp], counters);
  }
  add_row_counters(p.status, counters);
  finish_counts(p);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Dynamic shared memory: bias [E rounded to 16 bytes, if the mode has one], then per warp: kStages rows, WarpScratch; barriers last.
inline constexpr int kStages = 2;
__host__ __device__ inline std::size_t staged_warp_bytes(int E, std::size_t logit_bytes) {
  return kStages * static_cast<std::size_t>(E) * logit_bytes + sizeof(WarpScratch) + kStages * sizeof(std::uint64_t);
}

template <class T, int kVectors, int kMode>
__global__ void __launch_bounds__(kStagedMaxThreads<kVectors>, 1) router_forward_staged(const __grid_constant__ RouterForwardParams p) {
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  const int E = p.rows.E, warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  const int warps = static_cast<int>(blockDim.x) >> 5;
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(E) * sizeof(T);
  unsigned char* next = dynamic_smem;
  float* bias_smem = reinterpret_cast<float*>(next);
  if constexpr (kMode != kPlain) next += static_cast<std::size_t>(E) * sizeof(float);
  T* ring = reinterpret_cast<T*>(next + static_cast<std::size_t>(warp) * kStages * row_bytes);
  next += static_cast<std::size_t>(warps) * kStages * row_bytes;
  WarpScratch& scratch = reinterpret_cast<WarpScratch*>(next)[warp];
  next += static_cast<std::size_t>(warps) * sizeof(WarpScratch);
  std::uint64_t* full = reinterpret_cast<std::uint64_t*>(next) + warp * kStages;

  if (lane == 0) {
    for (int s = 0; s < kStages; ++s) ptx::mbarrier_init(full + s, 1);
    ptx::mbarrier_init_fence();
  }
  __syncwarp();
  // Warp w of all CTAs before warp w + 1: rows spread evenly over the SMs whatever T is.
  const std::int64_t first = static_cast<std::int64_t>(warp) * gridDim.x + blockIdx.x;
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * warps;
  const auto fetch = [&](std::int64_t t, int stage) {
    if (lane == 0 && t < p.rows.T) {
      ptx::mbarrier_arrive_expect(full + stage, row_bytes);
      ptx::bulk_load(ring + static_cast<std::size_t>(stage) * E, static_cast<const T*>(p.rows.logits) + t * p.rows.row_stride, row_bytes, full + stage);
    }
  };
  for (int s = 0; s < kStages; ++s) fetch(first + s * num_warps, s);
  if constexpr (kMode != kPlain) load_bias<T, kVectors>(p.rows, bias_smem);
  RowCounters counters;
  int stage = 0;
  std::uint32_t parity = 0;
  for (std::int64_t t = first; t < p.rows.T; t += num_warps) {
    ptx::mbarrier_wait(full + stage, parity);
    if (p.rows.padding != nullptr && p.rows.padding[t] != 0) {
      write_empty_row(p, t);
    } else {
      route_row<T, kVectors, kMode, true>(p, ring + static_cast<std::size_t>(stage) * E, bias_smem, t, scratch, counters);
    }
    __syncwarp();
    fetch(t + kStages * num_warps, stage);
    if (++stage == kStages) stage = 0, parity ^= 1u;
  }
  add_row_counters(p.status, counters);
  finish_counts(p);
}
#endif

}  // namespace waybill::cuda
