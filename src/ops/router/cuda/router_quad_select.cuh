// SPDX-License-Identifier: Apache-2.0
// Selection for four tokens a warp, 8 lanes each: threshold, kept groups, ranking. Method: router_forward_quad.cuh.
#pragma once

#include "ops/router/cuda/router_rank.cuh"

namespace waybill::cuda {

inline constexpr int kQuadMaxK = 8;
inline constexpr int kQuadCandidates = 32;  // of one row
enum QuadMode : int { kQuadPlain = 0, kQuadBiased = 1, kQuadGrouped = 2 };
// Threads of the one CTA an SM holds: 256 experts and biased rows need the registers more than the warps.
template <int kVectors, int kMode>
inline constexpr int kQuadThreads = kMode == kQuadPlain&& kVectors == 4 ? 1024 : 512;

// Of one warp. The strides keep the four tokens' accesses in different banks.
struct QuadEntry {
  float x;
  std::uint32_t id;
};
struct alignas(16) QuadScratch {
  QuadEntry list[4][kQuadCandidates + 8];
  std::uint32_t key[4][kQuadCandidates + 4];
  QuadEntry sorted[4][kQuadMaxK];
  float row_max[4], row_sum[4];  // softmax denominators, where the weights need them (kept here, not in registers)
};

// Reductions over the 8 lanes of a token.
__device__ __forceinline__ float quad_max(float v) {
#pragma unroll
  for (int step = 4; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(ptx::kFullWarp, v, step));
  return v;
}
__device__ __forceinline__ float quad_sum(float v) {
#pragma unroll
  for (int step = 4; step > 0; step >>= 1) v += __shfl_xor_sync(ptx::kFullWarp, v, step);
  return v;
}

__device__ __forceinline__ void order2(float& a, float& b) {
  const float high = fmaxf(a, b);
  b = fminf(a, b), a = high;
}
// A bitonic sequence into descending order.
template <int kSize>
__device__ __forceinline__ void sort_bitonic(float (&v)[kSize]) {
#pragma unroll
  for (int step = kSize / 2; step > 0; step >>= 1) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if ((i & step) == 0) order2(v[i], v[i + step]);
    }
  }
}

// A value that 8 of the 32 values of 8 lanes reach: the 8th largest of each lane's best two; and the largest of all.
__device__ __forceinline__ float eighth_largest(float (&m)[4], float& largest) {
  order2(m[0], m[1]), order2(m[2], m[3]);
  float two[2] = {fmaxf(m[0], m[2]), fmaxf(fminf(m[0], m[2]), fmaxf(m[1], m[3]))}, four[4], best[8];
#pragma unroll
  for (int i = 0; i < 2; ++i) four[i] = two[i], four[3 - i] = __shfl_xor_sync(ptx::kFullWarp, two[i], 1);
  sort_bitonic(four);
#pragma unroll
  for (int i = 0; i < 4; ++i) best[i] = four[i], best[7 - i] = __shfl_xor_sync(ptx::kFullWarp, four[i], 2);
  sort_bitonic(best);
  float smallest = kInfinity;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float other = __shfl_xor_sync(ptx::kFullWarp, best[7 - i], 4);
    smallest = fminf(smallest, fmaxf(best[i], other));
    if (i == 7) largest = fmaxf(best[0], other);  // of the other half: its best[0]
  }
  return smallest;
}

// Bit g of the result: group g of this row is kept, by exact keys. The whole warp works on one row; 8 groups of 32.
template <class T>
__device__ __noinline__ unsigned exact_kept_groups(const RouterForwardParams& p, const T* row, const float* bias_smem) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto value_of = [](std::uint32_t u) { return __uint_as_float(u ^ ((u >> 31) != 0 ? 0x80000000u : 0xffffffffu)); };
  std::uint32_t key[8];
#pragma unroll
  for (int g = 0; g < 8; ++g) {  // groups are only allowed with softmax and sigmoid scores here
    const float x = to_float(row[g * 32 + lane]), k = scalar::add(p.rows.score == kScoreSigmoid ? scalar::sigmoid(x) : x, bias_smem[g * 32 + lane]);
    key[g] = scalar::is_finite(x) && scalar::is_finite(k) ? scalar::order_key(k) : 0u;
  }
  std::uint64_t composite[8];
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    const std::uint32_t best = ptx::redux_max(key[g]);
    const int first = __ffs(static_cast<int>(__ballot_sync(ptx::kFullWarp, key[g] == best))) - 1;
    const std::uint32_t second = ptx::redux_max(lane == first ? 0u : key[g]);
    const bool two = second != 0 && p.group_best == 2;
    const float score = two ? scalar::add(value_of(best), value_of(second)) : value_of(best);
    const std::uint64_t count = best == 0 ? 0u : (two ? 2u : 1u);
    composite[g] = count == 0 ? 0u : (count << 48) | (static_cast<std::uint64_t>(scalar::order_key(score)) << 16) | static_cast<std::uint64_t>(7 - g);
  }
  unsigned kept = 0;
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    int rank = 0;
#pragma unroll
    for (int other = 0; other < 8; ++other) rank += composite[other] > composite[g];
    kept |= rank < p.num_kept ? 1u << g : 0u;
  }
  return kept;
}

// The kept groups of this lane's token, from its keys f [8 vectors = groups][4] to within 4.5e-7 and an ulp. Bit g as above; `certain`
// is false in one of the token's lanes where exact keys must decide.
__device__ __forceinline__ unsigned kept_groups(const RouterForwardParams& p, const float (&f)[8][4], bool& certain) {
  const int lane = static_cast<int>(threadIdx.x) & 31, sub = lane & 7;
  float best[8], second[8];
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    const float a = fmaxf(f[g][0], f[g][1]), b = fminf(f[g][0], f[g][1]), c = fmaxf(f[g][2], f[g][3]), d = fminf(f[g][2], f[g][3]);
    best[g] = fmaxf(a, c), second[g] = fmaxf(fminf(a, c), fmaxf(b, d));
  }
  // Each step halves the groups a lane looks after; in the end lane `sub` has group `sub` of all 8 lanes.
#pragma unroll
  for (int half = 4; half > 0; half >>= 1) {
    const bool upper = (sub & half) != 0;
#pragma unroll
    for (int g = 0; g < half; ++g) {
      const float sent_best = upper ? best[g] : best[g + half], sent_second = upper ? second[g] : second[g + half];
      const float b = upper ? best[g + half] : best[g], s = upper ? second[g + half] : second[g];
      const float other_best = __shfl_xor_sync(ptx::kFullWarp, sent_best, half), other_second = __shfl_xor_sync(ptx::kFullWarp, sent_second, half);
      second[g] = fmaxf(fminf(b, other_best), fmaxf(s, other_second));
      best[g] = fmaxf(b, other_best);
    }
  }
  const float score = p.group_best == 2 ? best[0] + second[0] : best[0];
  const float size = fabsf(best[0]) + (p.group_best == 2 ? fabsf(second[0]) : 0.0f);
  const float amplitude = quad_max(size);
  int rank = 0;
  float next = -kInfinity;  // the best score behind this one
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    const float other = __shfl_sync(ptx::kFullWarp, score, g, 8);
    const bool before = other > score || (other == score && g < sub);
    rank += before;
    next = fmaxf(next, before || g == sub ? -kInfinity : other);
  }
  const bool keep = rank < p.num_kept;
  // A key is off by at most 4.5e-7 (2^x 2 ulp, 1/x 1 ulp, the sum 1/2; the exact score 3) and half an ulp of the biased sum on both sides;
  // two keys a group, their sum rounded once more on both sides; two groups: 1.8e-6 and 4.8e-7 of the size.
  certain = rank != p.num_kept - 1 || score - next > 2.5e-6f + 8.0e-7f * amplitude;  // false for a group without two candidates (-Inf, NaN)
  return (__ballot_sync(ptx::kFullWarp, keep) >> (lane & 24)) & 0xffu;
}

// Leaves each row's best K sorted: logits where true is returned (see logit_key()), else scores. Warp uniform.
template <class T, int kSlots>
__device__ __forceinline__ bool rank_quad(const RouterRows& rows, const float* bias_smem, int count, int most, QuadScratch& scratch) {
  const int lane = static_cast<int>(threadIdx.x) & 31, sub = lane & 7, token = lane >> 3;
  float s[kSlots];
  std::uint32_t key[kSlots], id[kSlots];
  int rank[kSlots];
  bool by_logit = sizeof(T) == 2 && bias_smem == nullptr;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int q = 0; q < kSlots; ++q) {
      by_logit = by_logit && (sub + 8 * q >= count || orders_like_its_score(rows.score, scratch.list[token][sub + 8 * q].x));
    }
    by_logit = __all_sync(ptx::kFullWarp, by_logit);
  }
#pragma unroll
  for (int q = 0; q < kSlots; ++q) {
    const int i = sub + 8 * q;
    const QuadEntry entry = scratch.list[token][i];
    s[q] = entry.x, key[q] = 0, rank[q] = 0, id[q] = entry.id;
    if (i < count && by_logit) {
      key[q] = logit_key<T>(entry.x, entry.id);
    } else if (i < count) {
      s[q] = rows.score == kScoreSigmoid ? scalar::sigmoid(entry.x) : entry.x;
      const float k = bias_smem == nullptr ? s[q] : scalar::add(s[q], bias_smem[entry.id]);
      key[q] = scalar::is_finite(k) ? scalar::order_key(k) : 0u;
    }
    scratch.key[token][i] = key[q];
  }
  __syncwarp();
#pragma unroll 1
  for (int j = 0; j < most; j += 4) {
    const uint4 other = *reinterpret_cast<const uint4*>(&scratch.key[token][j]);
#pragma unroll
    for (int q = 0; q < kSlots; ++q) {
      if (other.x > key[q]) ++rank[q];
      if (other.y > key[q]) ++rank[q];
      if (other.z > key[q]) ++rank[q];
      if (other.w > key[q]) ++rank[q];
    }
  }
  // Equal keys share a rank, which shows in the sum over the warp; then ids decide.
  int off = sub == 0 ? -(count * (count - 1) / 2) : 0;
#pragma unroll
  for (int q = 0; q < kSlots; ++q) off += sub + 8 * q < count ? rank[q] : 0;
  if (ptx::redux_add(static_cast<unsigned>(off)) != 0) {
#pragma unroll 1
    for (int j = 0; j < most; ++j) {
      const std::uint32_t other = scratch.key[token][j], other_id = scratch.list[token][j].id;
#pragma unroll
      for (int q = 0; q < kSlots; ++q) rank[q] += j < count && other == key[q] && other_id < id[q];
    }
  }
#pragma unroll
  for (int q = 0; q < kSlots; ++q) {
    if (key[q] != 0 && rank[q] < rows.K) scratch.sorted[token][rank[q]] = QuadEntry{s[q], id[q]};
  }
  return by_logit;
}

// More than 16 candidates: rare, so it costs the hot path neither code nor registers.
template <class T>
__device__ __noinline__ bool rank_long_quad(const RouterRows& rows, const float* bias_smem, int count, int most, QuadScratch& scratch) {
  return rank_quad<T, 4>(rows, bias_smem, count, most, scratch);
}

}  // namespace waybill::cuda
