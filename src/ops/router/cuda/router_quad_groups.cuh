// SPDX-License-Identifier: Apache-2.0
// Kept groups for four tokens a warp, 8 groups of 32 experts: each of a token's 8 lanes has a group to itself, so that a group's best keys cost no
// exchange. Method: router_forward_quad.cuh.
#pragma once

#include "ops/router/cuda/router_quad_select.cuh"

namespace waybill::cuda {

// Bit g of the result: group g of this row is kept, by exact keys. The whole warp works on one row; 8 groups of 32.
template <class T>
__device__ __noinline__ unsigned exact_kept_groups(const RouterForwardParams& p, const T* row, const float* bias_smem) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
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

// Of this lane's group, from its keys f: the best two, and four of them in descending order, the best two first.
struct GroupBest {
  float second, four[4];
};
__device__ __forceinline__ void merge_best(float& best, float& second, float other_best, float other_second) {
  second = fmaxf(fminf(best, other_best), fmaxf(second, other_second));
  best = fmaxf(best, other_best);
}
__device__ __forceinline__ GroupBest best_of_group(const float (&f)[8][4]) {
  float best[4], second[4];  // of the same place of all vectors
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    best[i] = fmaxf(f[0][i], f[1][i]), second[i] = fminf(f[0][i], f[1][i]);
#pragma unroll
    for (int v = 2; v < 8; v += 2) merge_best(best[i], second[i], fmaxf(f[v][i], f[v + 1][i]), fminf(f[v][i], f[v + 1][i]));
  }
  float low = best[2], low_second = second[2];
  GroupBest g;
  g.second = second[0];
  float top = best[0];
  merge_best(top, g.second, best[1], second[1]), merge_best(low, low_second, best[3], second[3]), merge_best(top, g.second, low, low_second);
  // The four places' best in order; where the second best of all is not one of them, it takes the last one's place.
  order2(best[0], best[1]), order2(best[2], best[3]), order2(best[0], best[2]), order2(best[1], best[3]), order2(best[1], best[2]);
  const bool is_new = g.second > best[1];
  g.four[0] = best[0], g.four[1] = g.second, g.four[2] = is_new ? best[1] : best[2], g.four[3] = is_new ? best[2] : best[3];
  return g;
}

// The better one of two groups of a row by exact keys, by the whole warp: true where `in` comes before `out`. `sure` is false where a group lacks
// candidates.
template <class T>
__device__ __forceinline__ bool comes_first(const RouterForwardParams& p, const T* row, const float* bias_smem, int in, int out, bool& sure) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  std::uint32_t order[2];
  sure = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int e = (i == 0 ? in : out) * 32 + lane;
    const float x = to_float(row[e]), k = scalar::add(p.rows.score == kScoreSigmoid ? scalar::sigmoid(x) : x, bias_smem[e]);
    const std::uint32_t key = scalar::is_finite(x) && scalar::is_finite(k) ? scalar::order_key(k) : 0u, best = ptx::redux_max(key);
    const int first = __ffs(static_cast<int>(__ballot_sync(ptx::kFullWarp, key == best))) - 1;
    const std::uint32_t second = ptx::redux_max(lane == first ? 0u : key);
    sure = sure && second != 0;
    order[i] = scalar::order_key(p.group_best == 2 ? scalar::add(value_of(best), value_of(second)) : value_of(best));
  }
  return order[0] > order[1] || (order[0] == order[1] && in < out);
}

// Bit g: group g of this lane's token is kept, by approximate scores where they are sure of it: a key is off by at most 4.5e-7 (2^x 2 ulp, the
// product 1/2, 1/x 1, the sum 1/2; the exact score 3) and half an ulp of the biased sum on both sides; two keys a group, their sum rounded once more
// on both sides; two groups: 1.8e-6 and 4.8e-7 of the size. Else by exact keys, which the warp takes of one row after the other.
template <class T, int kExperts>
__device__ __forceinline__ unsigned kept_groups(const RouterForwardParams& p, const T* rows_smem, const float* bias_smem, bool active, const GroupBest& g) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const bool two = p.group_best == 2;
  const float score = two ? g.four[0] + g.second : g.four[0], size = fabsf(g.four[0]) + (two ? fabsf(g.second) : 0.0f);
  // A group without two candidates comes behind all others for certain.
  const float amplitude = __uint_as_float(ptx::redux_max(__float_as_uint(active && score > -kInfinity ? size : 0.0f)));
  const float within = score - (2.5e-6f + 8.0e-7f * amplitude);
  int rank = 0, reach = 0;  // groups that are better; that may be, this one too
#pragma unroll
  for (int other = 0; other < 8; ++other) {
    const float s = __shfl_sync(ptx::kFullWarp, score, other, 8);
    if (s > score) ++rank;
    if (s > within) ++reach;
  }
  const auto of_token = [lane](bool b) { return __ballot_sync(ptx::kFullWarp, b) >> (lane & 24) & 0xffu; };
  unsigned kept = of_token(rank < p.num_kept);
  // Kept, but as many as there are places may be better.
  const bool open = rank < p.num_kept && reach > p.num_kept, ties = __popc(kept) != p.num_kept;
  unsigned doubtful = __ballot_sync(ptx::kFullWarp, active && (open || ties));
  if (doubtful == 0) return kept;
  // One group kept and one dropped: these two alone are compared.
  const unsigned in = of_token(open), out = of_token(rank == p.num_kept), several = of_token(open && reach > p.num_kept + 1);
  const bool one = !ties && __popc(in) == 1 && __popc(out) == 1 && several == 0;
#pragma unroll 1
  while (doubtful != 0) {
    const int from = __ffs(static_cast<int>(doubtful)) - 1;
    const T* row = rows_smem + (from >> 3) * kExperts;
    bool sure = __shfl_sync(ptx::kFullWarp, static_cast<int>(one), from) != 0;
    unsigned exact = __shfl_sync(ptx::kFullWarp, kept, from);
    if (sure) {
      const unsigned first = __shfl_sync(ptx::kFullWarp, in, from), second = __shfl_sync(ptx::kFullWarp, out, from);
      const int a = __ffs(static_cast<int>(first)) - 1, b = __ffs(static_cast<int>(second)) - 1;
      if (!comes_first(p, row, bias_smem, a, b, sure)) exact ^= first | second;
    }
    if (!sure) exact = exact_kept_groups(p, row, bias_smem);
    if (lane >> 3 == from >> 3) kept = exact;
    doubtful &= ~(0xffu << (from & 24));
  }
  return kept;
}

// A value that 8 keys of the kept groups reach: the 8th largest of four of each, of four groups; -Inf where these have fewer. slots [4 x 4] of the
// token in shared memory.
__device__ __forceinline__ float eighth_largest_of_groups(const RouterForwardParams& p, const GroupBest& g, unsigned kept, std::uint32_t* slots) {
  const int sub = static_cast<int>(threadIdx.x) & 7;
  const bool keep = (kept >> sub & 1u) != 0;
  const int before = __popc(kept & ((1u << sub) - 1u)), slot = keep ? before : p.num_kept + sub - before;
  if (slot < 4) {
    float4 four = make_float4(-kInfinity, -kInfinity, -kInfinity, -kInfinity);
    if (keep) four = make_float4(g.four[0], g.four[1], g.four[2], g.four[3]);
    *reinterpret_cast<float4*>(slots + slot * 4) = four;
  }
  __syncwarp();
  const float4 v = *reinterpret_cast<const float4*>(slots + (sub & 3) * 4);
  const float four[4] = {v.x, v.y, v.z, v.w};
  float best[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) best[i] = four[i], best[7 - i] = __shfl_xor_sync(ptx::kFullWarp, four[i], 1);
  sort_bitonic(best);
  float smallest = kInfinity;
#pragma unroll
  for (int i = 0; i < 8; ++i) smallest = fminf(smallest, fmaxf(best[i], __shfl_xor_sync(ptx::kFullWarp, best[7 - i], 2)));
  return smallest;
}

}  // namespace waybill::cuda
