// SPDX-License-Identifier: Apache-2.0
// Selection for four tokens a warp, 8 lanes each: threshold, ranking. Method: router_forward_quad.cuh.
#pragma once

#include "ops/router/cuda/router_rank.cuh"

namespace waybill::cuda {

// kVectors * 32 experts. Of 512, the threshold is the K-th largest of 32 maxima, which few more than K logits reach up to this K.
template <int kVectors>
inline constexpr int kQuadMaxK = kVectors == 16 ? 12 : 8;
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
  QuadEntry sorted[4][24];       // 16 of them used
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

// The K-th largest of the 32 values of 8 lanes, K <= 16; and the largest.
__device__ __forceinline__ float kth_largest(const float (&m)[4], int K, float& largest) {
  float four[4] = {m[0], m[1], m[2], m[3]}, eight[8], best[16];
  order2(four[0], four[1]), order2(four[2], four[3]), order2(four[0], four[2]), order2(four[1], four[3]), order2(four[1], four[2]);
#pragma unroll
  for (int i = 0; i < 4; ++i) eight[i] = four[i], eight[7 - i] = __shfl_xor_sync(ptx::kFullWarp, four[i], 1);
  sort_bitonic(eight);
#pragma unroll
  for (int i = 0; i < 8; ++i) best[i] = eight[i], best[15 - i] = __shfl_xor_sync(ptx::kFullWarp, eight[i], 2);
  sort_bitonic(best);
  float other[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) other[i] = __shfl_xor_sync(ptx::kFullWarp, best[15 - i], 4);
#pragma unroll
  for (int i = 0; i < 16; ++i) best[i] = fmaxf(best[i], other[i]);
  sort_bitonic(best);
  largest = best[0];
  float kth = best[15];
#pragma unroll
  for (int i = 14; i >= 0; --i) kth = K == i + 1 ? best[i] : kth;
  return kth;
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
