// SPDX-License-Identifier: Apache-2.0
// From a row's candidates to its outputs, by one warp: scores, ranking by counting, weights, and the exact path for rare rows.
#pragma once

#include "ops/router/cuda/router_select.cuh"

namespace waybill::cuda {

// Slots that the ranking reads: 32, 64 or all.
template <int kCandidates>
__device__ __forceinline__ int ranked_slots(int count) {
  return count <= 32 ? 32 : (count <= 64 ? 64 : kCandidates);
}

// 16-bit logits without a bias: the logit's 16 bits above the inverted id order like (score, id), so that ties, which are common among
// such logits, need no second look and only the chosen need a score. Below kOrderHigh the scores of neighbouring 16-bit logits differ by far
// more than their error; above it sigmoid saturates, below kOrderLow it underflows.
inline constexpr float kOrderLow = -64.0f, kOrderHigh = 8.0f;
template <class T>
__device__ __forceinline__ std::uint32_t logit_key(float x, std::uint32_t id) {
  std::uint32_t u = 0;
  if constexpr (std::is_same_v<T, __half>) {
    u = __half_as_ushort(__float2half_rn(scalar::add(x, 0.0f)));
  } else {
    u = __float_as_uint(scalar::add(x, 0.0f)) >> 16;
  }
  u ^= (u & 0x8000u) != 0 ? 0xffffu : 0x8000u;
  return (u << 16) | (0xffffu - id);
}
__device__ __forceinline__ bool orders_like_its_score(int score, float x) {
  return score == kScoreSoftmax || score == kScoreSoftmaxSelected || (x >= kOrderLow && x <= kOrderHigh);
}
// True: scratch.key holds logit keys (0 beyond `count`) and scratch.x the logits still. Warp uniform.
template <class T, int kCandidates>
__device__ __forceinline__ bool key_by_logit(const RouterRows& rows, int count, WarpScratch<kCandidates>& scratch) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  bool fits = true;
#pragma unroll 1
  for (int i = lane; i < (count <= 32 ? 32 : (count <= 64 ? 64 : kCandidates)); i += 32) {
    const float x = i < count ? scratch.x[i] : 0.0f;
    fits = fits && orders_like_its_score(rows.score, x);
    scratch.key[i] = i < count && scalar::is_finite(x) ? logit_key<T>(x, scratch.id[i]) : 0u;
  }
  fits = __all_sync(ptx::kFullWarp, fits);
  __syncwarp();
  return fits;
}

// Turns the listed logits into raw scores (x) and exact keys (0: no candidate; also from `count` to the end of the ranked slots).
template <bool kSqrt, int kCandidates>
__device__ __forceinline__ void score_candidates(const RouterRows& rows, const float* bias_smem, int count, WarpScratch<kCandidates>& scratch) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll 1
  for (int i = lane; i < ranked_slots<kCandidates>(count); i += 32) {
    std::uint32_t key = 0;
    if (i < count) {
      const float x = scratch.x[i], s = kSqrt ? scalar::sqrt_softplus(x) : (rows.score == kScoreSigmoid ? scalar::sigmoid(x) : x);
      const float k = scalar::add(s, bias_smem == nullptr ? 0.0f : bias_smem[scratch.id[i]]);
      if (scalar::is_finite(x) && scalar::is_finite(k)) key = scalar::order_key(k);
      scratch.x[i] = s;
    }
    scratch.key[i] = key;
  }
  __syncwarp();
}

// Out of line as a whole: a call inside the loop would cost the common scores registers.
template <int kCandidates>
__device__ __noinline__ void score_candidates_sqrt(const RouterRows& rows, const float* bias_smem, int count, WarpScratch<kCandidates>& scratch) {
  score_candidates<true>(rows, bias_smem, count, scratch);
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
// by_logit: the sorted values are logits.
template <class T, bool kRare, int kCandidates>
__device__ __forceinline__ bool write_row(const RouterForwardParams& p, WarpScratch<kCandidates>& scratch, int chosen, int t, bool by_logit) {
  const RouterRows& rows = p.rows;
  const int lane = static_cast<int>(ptx::thread_again() & 31u), K = rows.K;  // no register keeps it over the ranking
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
  if (by_logit && !is_softmax) {
    s0 = has0 ? scalar::sigmoid(s0) : 0.0f;
    if (two) s1 = has1 ? scalar::sigmoid(s1) : 0.0f;
  }
  float sum = 1.0f;
  if (is_softmax) {
    float shift = scratch.row_max;
    if (renormalise) shift = rows.bias == nullptr ? __shfl_sync(ptx::kFullWarp, s0, 0) : warp_max(fmaxf(has0 ? s0 : -kInfinity, has1 ? s1 : -kInfinity));
    s0 = has0 ? exp_difference(s0, shift) : 0.0f;
    if (two) s1 = has1 ? exp_difference(s1, shift) : 0.0f;
    sum = scratch.row_sum;
  }
  if (renormalise) {
    sum = warp_sum(s0 + s1);
    if ((!is_softmax && !(sum > 1e-12f)) || rows.epsilon > 0.0f) {  // underflow, parity; also rows without a route
      if (kRare && lane == 0) store_factor(rows, p.factors, t, 0.0f);
      if constexpr (kRare) write_rare_row<T>(p, chosen, scratch.sorted_id(), scratch.x, t, scratch.row_max, scratch.row_sum);
      return kRare;
    }
  }
  const float factor = scalar::mul(rows.scale, ptx::rcp_approx(fmaxf(sum, 1e-30f)));  // no route: 0 / 1e-30
  if (lane < K) p.weights[at] = scalar::mul(s0, factor);
  if (lane == 0) store_factor(rows, p.factors, t, factor);
  if (two && lane + 32 < K) p.weights[at + 32] = scalar::mul(s1, factor);
  return true;
}

__device__ __forceinline__ void write_empty_row(const RouterForwardParams& p, int t, std::uint32_t* hist) {
  count_missing(p.rows, hist, 0);
  if ((threadIdx.x & 31) == 0) store_factor(p.rows, p.factors, t, 0.0f);
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
                                           std::uint32_t* hist) {
  bool by_logit = false;
  if constexpr (sizeof(T) == 2) by_logit = bias_smem == nullptr && p.rows.score != kScoreSqrtSoftplus && key_by_logit<T>(p.rows, count, scratch);
  if (p.rows.score == kScoreSqrtSoftplus) {
    score_candidates_sqrt(p.rows, bias_smem, count, scratch);
  } else if (!by_logit) {
    score_candidates<false>(p.rows, bias_smem, count, scratch);
  }
  int chosen = 0;
  if (count <= 32) {
    chosen = rank_candidates<1>(p.rows.K, count, scratch);
  } else if (count <= 64) {
    chosen = rank_candidates<2>(p.rows.K, count, scratch);
  } else {
    chosen = rank_candidates<kCandidates / 32>(p.rows.K, count, scratch);
  }
  if (p.ids != nullptr && !write_row<T, kRare>(p, scratch, chosen, t, by_logit)) return false;
  if (chosen < p.rows.K) {
    count_short_rows(p.status, 1);
    count_missing(p.rows, hist, chosen);
  }
  const int lane = static_cast<int>(ptx::thread_again() & 31u);
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
  store_sum(scratch, row_max, row_sum);
  const int count = exact_candidates(rows, row, bias_smem, false, 0xffffffffu, scratch);
  __syncwarp();
  (void)finish_row<T, true>(p, bias_smem, count, scratch, t, hist);
}

}  // namespace waybill::cuda
