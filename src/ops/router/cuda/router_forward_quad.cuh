// SPDX-License-Identifier: Apache-2.0
// Router forward for short rows (E = 128 or 256, K <= 8; plain rows of E = 512, K <= 12) on sm_90: one warp takes four tokens, 8 lanes each, so that
// the steps whose cost does not depend on E (threshold, ranking, weights) are paid once for four rows. Plain rows, rows with a bias or a mask, and 8
// groups of 32 experts scored by their best two.
//
//   One bulk copy brings the warp's four rows into shared memory; the next four are on their way while these are ranked.
//   Threshold: 32 maxima of disjoint parts of a row; the 8th largest of each lane's best two (E = 512: the K-th largest of all), found by merging
//   sorted lists over the lanes, is reached by 8 logits for certain and by 9 to 10 on random rows.
//   Groups: a lane has a group to itself and scores it by approximate keys. Where a group kept and one dropped are closer than the largest possible
//   error (1 to 3 of 8,192 random rows), the warp takes exact keys of these two, of all groups where more are that close. The threshold is then
//   the 8th largest of four keys of each kept group.
// Results are those of router_forward_warp.cuh; rows with too many candidates go through its exact path.
#pragma once

#include <atomic>

#include "core/cuda/launch.h"
#include "ops/router/cuda/router_quad_groups.cuh"

namespace waybill::cuda {

// kVectors * 32 experts. T: logits; kMode: QuadMode. Four rows from t0 on are in `rows_smem` [4][E]. False: they must go through the
// exact path one by one; nothing but rows that are not finite was counted. `next()` is called once the rows have been read, `counted()` once
// their routes have been counted, before the weights are made.
template <class T, int kVectors, int kMode, class Next, class Counted>
__device__ __forceinline__ bool route_quad(const RouterForwardParams& p, int t0, T* rows_smem, const float* bias_smem, QuadScratch& scratch,
                                           std::uint32_t* hist, const Next& next, const Counted& counted) {
  const RouterRows& rows = p.rows;
  constexpr int kWide = kMode == kQuadGrouped || sizeof(T) == 4 ? 4 : 8;  // experts of one access
  constexpr int kExperts = kVectors * 32, kHeld = kExperts / 8, kWords = (kHeld + 31) / 32, kWord = kHeld < 32 ? kHeld : 32;
  constexpr int kOut = (kQuadMaxK<kVectors> + 7) / 8;  // routes of a lane
  const int lane = static_cast<int>(threadIdx.x) & 31, sub = lane & 7, token = lane >> 3, K = rows.K, t = t0 + token;
  const bool exists = t < static_cast<int>(rows.T), active = exists && !(rows.padding != nullptr && rows.padding[exists ? t : t0] != 0);
  T* row = rows_smem + token * kExperts;
  // Grouped: a lane has group `sub`, its vectors in an order that keeps the lanes' accesses in different banks.
  const auto expert_of = [&](int j) { return kMode == kQuadGrouped ? sub * 32 + (j ^ sub * 4) : j / kWide * (8 * kWide) + sub * kWide + j % kWide; };
  float f[kHeld / 4][4];  // entry j at [j / 4][j % 4]
  const auto load_entries = [&] {
    if constexpr (kWide == 8) {  // 16-byte accesses of 16-bit logits
#pragma unroll
      for (int v = 0; v < kHeld / 4; v += 2) {
        const uint4 raw = *reinterpret_cast<const uint4*>(row + expert_of(v * 4));
        widen4<T>(make_uint2(raw.x, raw.y), f[v]), widen4<T>(make_uint2(raw.z, raw.w), f[v + 1]);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kHeld / 4; ++v) load4<T, false>(row + expert_of(v * 4), f[v]);
    }
  };
  load_entries();
  float poison[4] = {};
#pragma unroll
  for (int v = 0; v < kHeld / 4; ++v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) poison[i] = __fmaf_rn(f[v][i], kMode == kQuadPlain ? 0.0f : f[v][i], poison[i]);
  }
  const float poisoned_sum = (poison[0] + poison[1]) + (poison[2] + poison[3]);
  // Not finite; with a bias also logits so large that the product of two 1 + e^-x might overflow.
  constexpr float kMostSquares = 3600.0f;
  const unsigned poisoned = __ballot_sync(ptx::kFullWarp, active && !(poisoned_sum <= kMostSquares));
  if (poisoned != 0) {
    bool is_bad = false;
#pragma unroll 1
    for (int j = 0; j < kHeld; ++j) {  // in place: -Inf is never chosen and NaN has no key
      T& x = row[expert_of(j)];
      if (!scalar::is_finite(to_float(x))) x = static_cast<T>(kMode == kQuadPlain ? -kInfinity : __uint_as_float(0x7fc00000u)), is_bad = true;
    }
    const unsigned bad = __ballot_sync(ptx::kFullWarp, active && is_bad);
    count_nonfinite_rows(p.status, ((bad & 0xffu) != 0) + ((bad & 0xff00u) != 0) + ((bad & 0xff0000u) != 0) + (bad >> 24 != 0));
    ptx::fence_async_proxy();  // before the copy engine writes the rows again
    __syncwarp();              // other lanes may read them for exact keys
    load_entries();
    if (kMode != kQuadPlain && rows.score == kScoreSigmoid) {
#pragma unroll
      for (int v = 0; v < kHeld / 4; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f[v][i] = fmaxf(f[v][i], -40.0f);  // NaN too; e^-40: far below what a key can be off by
      }
    }
  }
  const bool need_sum = rows.score == kScoreSoftmax && rows.renormalise == 0;
  if (kMode == kQuadBiased && need_sum) {
    const auto value = [&](int v, int i) {
      const float x = f[v][i];
      return x == x && !is_masked(bias_smem[expert_of(v * 4 + i)]) ? x : -kInfinity;
    };
    float row_max = -kInfinity, row_sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kHeld / 4; ++v) row_max = fmaxf(row_max, fmaxf(fmaxf(value(v, 0), value(v, 1)), fmaxf(value(v, 2), value(v, 3))));
    row_max = quad_max(row_max);
    if (row_max > -kInfinity) {
#pragma unroll
      for (int v = 0; v < kHeld / 4; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) row_sum += ptx::ex2_approx((value(v, i) - row_max) * 1.44269504f);
      }
    }
    row_sum = quad_sum(row_sum);
    if (sub == 0) scratch.row_max[token] = row_max, scratch.row_sum[token] = row_sum;
  }
  if constexpr (kMode != kQuadPlain) {
    const auto bias_of = [&](int v, float(&bias)[4]) {
      const float4 b = *reinterpret_cast<const float4*>(bias_smem + expert_of(v * 4));
      bias[0] = b.x, bias[1] = b.y, bias[2] = b.z, bias[3] = b.w;
    };
    if (rows.score == kScoreSigmoid) {
#pragma unroll
      for (int v = 0; v < kHeld / 4; ++v) {
        float bias[4];
        bias_of(v, bias);
        add_sigmoids(f[v][0], f[v][1], bias[0], bias[1]), add_sigmoids(f[v][2], f[v][3], bias[2], bias[3]);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kHeld / 4; ++v) {
        float bias[4];
        bias_of(v, bias);
#pragma unroll
        for (int i = 0; i < 4; ++i) f[v][i] += bias[i];
      }
    }
    if (poisoned != 0 || rows.mask != nullptr) {  // not finite, or masked (NaN)
#pragma unroll
      for (int v = 0; v < kHeld / 4; ++v) {
        float x[4];
        load4<T, false>(row + expert_of(v * 4), x);
#pragma unroll
        for (int i = 0; i < 4; ++i) f[v][i] = x[i] == x[i] ? fmaxf(f[v][i], -kInfinity) : -kInfinity;
      }
    }
  }
  float largest = -kInfinity, reached;  // by K entries of the row
  bool has_hits = active;
  if constexpr (kMode == kQuadGrouped) {
    const GroupBest group = best_of_group(f);
    const unsigned kept = kept_groups<T, kExperts>(p, rows_smem, bias_smem, active, group);
    has_hits = active && (kept >> sub & 1u) != 0;
    reached = eighth_largest_of_groups(p, group, kept, scratch.key[token]);
  } else {
    float maxima[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      maxima[i] = f[0][i];
#pragma unroll
      for (int v = 1; v < kHeld / 4; ++v) maxima[i] = fmaxf(maxima[i], f[v][i]);
    }
    reached = kVectors == 16 ? kth_largest(maxima, K, largest) : eighth_largest(maxima, largest);
  }
  constexpr int kFilter = kMode == kQuadPlain ? kPlain : kBiased;
  float threshold = fmaxf(lowered_threshold(kFilter, rows.score, reached), -3.402823466e38f);
  threshold = threshold == 0.0f ? -1.4e-45f : threshold;  // so that the sign of a difference tells -0 from what lies below
  if constexpr (kMode == kQuadPlain) {                    // read again: the registers were free in between
    __syncwarp();
    load_entries();
    if (need_sum) {
      float row_sum = 0.0f;
      if (largest > -kInfinity) {
#pragma unroll
        for (int v = 0; v < kHeld / 4; ++v) {
#pragma unroll
          for (int i = 0; i < 4; ++i) row_sum += ptx::ex2_approx((f[v][i] - largest) * 1.44269504f);
        }
      }
      row_sum = quad_sum(row_sum);
      if (sub == 0) scratch.row_max[token] = largest, scratch.row_sum[token] = row_sum;
    }
  }
  unsigned hits[kWords];  // bit kWord - 1 - j of word w: entry w * 32 + j is not below the threshold
  int mine = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    unsigned below = 0;
#pragma unroll
    for (int j = 0; j < kWord; ++j) {
      below = __funnelshift_l(__float_as_uint(f[(w * 32 + j) / 4][j % 4] - threshold), below, 1);
      if (kMode == kQuadPlain && j == kWord / 2) __syncwarp();
    }
    hits[w] = has_hits ? ~below & (kWord == 32 ? 0xffffffffu : (1u << kWord % 32) - 1u) : 0u;
    mine += __popc(hits[w]);
  }
  int slot = mine;
#pragma unroll
  for (int step = 1; step < 8; step <<= 1) {
    const int lower = __shfl_up_sync(ptx::kFullWarp, slot, step, 8);
    if (sub >= step) slot += lower;
  }
  const int count = __shfl_sync(ptx::kFullWarp, slot, 7, 8);
  slot -= mine;
  const int most = static_cast<int>(ptx::redux_max(static_cast<unsigned>(count)));
  if (most > kQuadCandidates) {
    __syncwarp();
    next();
    return false;
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    while (hits[w] != 0) {  // two at a time: their loads overlap
      const int j0 = __clz(static_cast<int>(hits[w])) - (32 - kWord), e0 = expert_of(w * 32 + j0);
      hits[w] ^= 1u << (kWord - 1 - j0);
      const bool second = hits[w] != 0;
      const int j1 = second ? __clz(static_cast<int>(hits[w])) - (32 - kWord) : j0, e1 = expert_of(w * 32 + j1);
      const float x0 = to_float(row[e0]), x1 = to_float(row[e1]);
      scratch.list[token][slot] = QuadEntry{x0, static_cast<std::uint32_t>(e0)};
      if (second) {
        hits[w] ^= 1u << (kWord - 1 - j1);
        scratch.list[token][slot + 1] = QuadEntry{x1, static_cast<std::uint32_t>(e1)};
      }
      slot += second ? 2 : 1;
    }
  }
  __syncwarp();
  next();
  const float* bias = kMode == kQuadPlain ? nullptr : bias_smem;
  constexpr int kSlots = kVectors == 16 ? 3 : 2;
  const bool by_logit = most <= 8 * kSlots ? rank_quad<T, kSlots>(rows, bias, count, most, scratch) : rank_long_quad<T>(rows, bias, count, most, scratch);
  __syncwarp();
  const int chosen = min(count, K);
  const bool is_softmax = rows.score == kScoreSoftmax || rows.score == kScoreSoftmaxSelected;
  const bool renormalise = rows.renormalise != 0 || rows.score == kScoreSoftmaxSelected;
  bool has[kOut], is_seen = false;
  std::uint32_t id[kOut];
  float s[kOut];
#pragma unroll
  for (int q = 0; q < kOut; ++q) {
    has[q] = sub + 8 * q < chosen;
    const QuadEntry own = scratch.sorted[token][sub + 8 * q];
    s[q] = has[q] ? own.x : 0.0f, id[q] = own.id;
    if (sizeof(T) == 2 && by_logit && !is_softmax) s[q] = has[q] ? scalar::sigmoid(s[q]) : 0.0f;
    is_seen = is_seen || s[q] > 1e-12f;
  }
  // Underflow (of sigmoid: the others' best score is 1) or parity. A sum of scores is not below the largest one.
  if (renormalise && rows.epsilon > 0.0f) return false;
  if (renormalise && !is_softmax) {
    const unsigned above = __ballot_sync(ptx::kFullWarp, is_seen) >> (lane & 24) & 0xffu;
    if (__any_sync(ptx::kFullWarp, active && chosen > 0 && above == 0)) return false;
  }
  const unsigned is_short = __ballot_sync(ptx::kFullWarp, active && chosen < K);
  if (is_short != 0) {
    count_short_rows(p.status, ((is_short & 0xffu) != 0) + ((is_short & 0xff00u) != 0) + ((is_short & 0xff0000u) != 0) + (is_short >> 24 != 0));
  }
  if (exists && sub == 0 && chosen < K) atomicAdd(hist + rows.E, static_cast<std::uint32_t>(K - chosen));
#pragma unroll
  for (int q = 0; q < kOut; ++q) {
    if (has[q]) atomicAdd(hist + id[q], 1u);
  }
  counted();
  float sum = 1.0f, own_sum = 0.0f;
  if (is_softmax) {
    float shift = scratch.row_max[token];
    if (renormalise) shift = kMode == kQuadPlain ? __shfl_sync(ptx::kFullWarp, s[0], 0, 8) : quad_max(has[0] ? s[0] : -kInfinity);
#pragma unroll
    for (int q = 0; q < kOut; ++q) s[q] = has[q] ? exp_difference(s[q], shift) : 0.0f;
    sum = scratch.row_sum[token];
  }
#pragma unroll
  for (int q = 0; q < kOut; ++q) own_sum += s[q];
  if (renormalise) sum = quad_sum(own_sum);
  const float factor = scalar::mul(rows.scale, ptx::rcp_approx(fmaxf(sum, 1e-30f)));
#pragma unroll
  for (int q = 0; q < kOut; ++q) {
    if (p.ids == nullptr || !exists || sub + 8 * q >= K) continue;
    const std::int64_t at = static_cast<std::int64_t>(t) * K + sub + 8 * q;
    store_id(p.ids, p.id_bytes, at, has[q] ? static_cast<std::int32_t>(id[q]) : -1);
    p.weights[at] = scalar::mul(s[q], factor);
    if (q == 0 && sub == 0) store_factor(rows, p.factors, t, chosen > 0 ? factor : 0.0f);
  }
  __syncwarp();
  return true;
}

// Grouped rows that need the exact path: the groups first, then route_exactly() with the dropped experts masked.
template <class T, int kExperts>
__device__ __noinline__ void route_grouped_exactly(const RouterForwardParams& p, const float* bias_smem, int t, WarpScratch<128>& scratch,
                                                   std::uint32_t* hist) {
  const T* row = row_of<T>(p.rows, t);
  const unsigned groups = exact_kept_groups(p, row, bias_smem);
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  std::uint32_t kept = 0;  // of this lane's experts in vectors of 128: see exact_candidates()
#pragma unroll
  for (int v = 0; v < kExperts / 128; ++v) kept |= (groups >> (v * 4 + lane / 8) & 1u) << v;
  const int count = exact_candidates(p.rows, row, bias_smem, true, kept, scratch);
  __syncwarp();
  (void)finish_row<T, true>(p, bias_smem, count, scratch, t, hist);
}

// Dynamic shared memory: the rows of each warp, then its scratch.
template <class T, int kVectors>
__host__ __device__ constexpr int quad_warp_bytes() {
  return 4 * kVectors * 32 * static_cast<int>(sizeof(T)) + static_cast<int>(sizeof(QuadScratch));
}

template <class T, int kVectors, int kMode>
__global__ void __launch_bounds__(kQuadThreads<kVectors, kMode>, 1) router_forward_quad(const __grid_constant__ RouterForwardParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  static_assert(sizeof(QuadScratch) >= sizeof(WarpScratch<128>));
  constexpr int kExperts = kVectors * 32, kThreads = kQuadThreads<kVectors, kMode>, kWarps = kThreads / 32;
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  constexpr bool kCanCountByWarp = kVectors <= 8;
  static_assert(!kCanCountByWarp || sizeof(QuadScratch) >= 64 * kVectors * sizeof(std::uint32_t));
  __shared__ std::uint32_t hist[kExperts + 1], arrived;
  __shared__ __align__(16) float bias_smem[kMode == kQuadPlain ? 4 : kExperts];
  __shared__ std::uint64_t barriers[kWarps];
  const RouterRows& rows = p.rows;
  // Of this warp; read anew where they are used, so that no register holds them.
  const auto warp = [] { return static_cast<int>(ptx::thread_again() >> 5); };
  const auto rows_smem = [&] { return reinterpret_cast<T*>(dynamic_smem) + warp() * 4 * kExperts; };
  const auto scratch = [&]() -> QuadScratch& { return reinterpret_cast<QuadScratch*>(dynamic_smem + kWarps * 4 * kExperts * sizeof(T))[warp()]; };
  const auto buffer = [&] { return reinterpret_cast<std::uint32_t*>(&scratch()); };  // for the counts, once the lists have been read
  begin_kernel();
  if ((threadIdx.x & 31) == 0) {
    ptx::mbarrier_init(barriers + warp(), 1);
    ptx::mbarrier_init_fence();
  }
  clear_histogram(hist, rows.E);
  if (threadIdx.x == 0) arrived = 0;
  __syncwarp();
  await_previous();
  constexpr std::uint32_t kRowBytes = kExperts * sizeof(T);
  const auto fetch = [&](int t0) {
    const int T_rows = static_cast<int>(rows.T);
    if ((threadIdx.x & 31) != 0 || t0 >= T_rows) return;
    const int count = min(4, T_rows - t0);
    std::uint64_t* full = barriers + warp();
    ptx::mbarrier_arrive_expect(full, static_cast<std::uint32_t>(count) * kRowBytes);
    if (rows.row_stride == kExperts) {
      ptx::bulk_load(rows_smem(), row_of<T>(rows, t0), static_cast<std::uint32_t>(count) * kRowBytes, full);
    } else {
#pragma unroll 1
      for (int i = 0; i < count; ++i) ptx::bulk_load(rows_smem() + i * kExperts, row_of<T>(rows, t0 + i), kRowBytes, full);
    }
  };
  int t0 = (warp() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)) * 4;
  // The bias is asked for ahead of the rows: behind those of all CTAs it would come last.
  static_assert(kMode == kQuadPlain || kThreads >= kExperts);
  std::uint32_t bias = 0;
  if (kMode != kQuadPlain && threadIdx.x < kExperts && rows.bias != nullptr) {
    bias = ptx::ld_relaxed_gpu(reinterpret_cast<const std::uint32_t*>(rows.bias) + threadIdx.x);
  }
  fetch(t0);
  if (kMode != kQuadPlain && threadIdx.x < kExperts) {
    bias_smem[threadIdx.x] = effective_bias(rows, static_cast<int>(threadIdx.x), __uint_as_float(bias));
  }
  __syncthreads();
  const bool by_warp = kCanCountByWarp && counts_by_warp(p);
  CountsInFlight<kCanCountByWarp ? kVectors : 8> counts;
  counts.number = kCountsHeld;
  for (std::uint32_t parity = 0; t0 < static_cast<int>(rows.T); parity ^= 1u) {
    ptx::mbarrier_wait(barriers + warp(), parity);
    const int stride = static_cast<int>(gridDim.x) * kWarps * 4;
    const bool done = route_quad<T, kVectors, kMode>(
        p, t0, rows_smem(), bias_smem, scratch(), hist, [&] { fetch(t0 + stride); },
        [&] {
          if constexpr (kCanCountByWarp) {
            if (by_warp && t0 + stride >= static_cast<int>(rows.T)) hand_over_counts<kVectors>(p, hist, &arrived, buffer(), counts);
          }
        });
    for (int t = t0; !done && t < min(t0 + 4, static_cast<int>(rows.T)); ++t) {
      __syncwarp();
      WarpScratch<128>& list = reinterpret_cast<WarpScratch<128>&>(scratch());
      if (rows.padding != nullptr && rows.padding[t] != 0) {
        write_empty_row(p, t, hist);
      } else if constexpr (kMode == kQuadGrouped) {
        route_grouped_exactly<T, kExperts>(p, bias_smem, t, list, hist);
      } else {
        route_exactly<T>(p, kMode == kQuadPlain ? nullptr : bias_smem, t, list, hist);
      }
    }
    __syncwarp();
    t0 += stride;
  }
  if (!by_warp) {
    flush_histogram(p, hist);
    finish_counts(p, draw_number(p));
  } else if constexpr (kCanCountByWarp) {
    if (counts.number == kCountsHeld) {  // the last rows took the exact path, or there were none
      hand_over_late<kVectors>(p, hist, &arrived, buffer());
    } else {
      finish_counts_by_warp<kVectors>(p, counts, buffer());
    }
  }
#endif
}

// The mode in which the quad kernel takes the problem, or -1.
inline int quad_mode(const RouterForwardParams& p, std::size_t logit_size, const DeviceLimits& limits) {
  const RouterRows& rows = p.rows;
  const bool has_groups = p.num_kept < p.num_groups, has_bias = rows.bias != nullptr || rows.mask != nullptr;
  if (limits.compute_major < 9 || rows.K > (rows.E == 512 ? kQuadMaxK<16> : kQuadMaxK<8>) || (rows.E != 128 && rows.E != 256 && rows.E != 512)) return -1;
  if (static_cast<std::size_t>(rows.row_stride) * logit_size % 16 != 0 || reinterpret_cast<std::uintptr_t>(rows.logits) % 16 != 0) return -1;
  if (rows.score == kScoreSqrtSoftplus) return -1;
  if (!has_groups && !has_bias) return kQuadPlain;
  if (!has_groups) return rows.E == 512 ? -1 : kQuadBiased;
  return p.num_groups == 8 && rows.E == 256 && p.group_best <= 2 && !(rows.score == kScoreSoftmax && rows.renormalise == 0) ? kQuadGrouped : -1;
}

template <class T, int kVectors, int kMode>
void launch_quad(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  constexpr int kThreads = kQuadThreads<kVectors, kMode>, kWarps = kThreads / 32, kBytes = quad_warp_bytes<T, kVectors>() * kWarps;
  const auto kernel = router_forward_quad<T, kVectors, kMode>;
  static std::atomic<bool> done[16] = {};
  if (!done[limits.device & 15].exchange(true)) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  const std::int64_t needed = ((p.rows.T + 3) / 4 + kWarps - 1) / kWarps, resident = limits.num_sms;
  const auto grid = static_cast<unsigned>(needed < 1 ? 1 : (needed < resident ? needed : resident));
  launch_kernel(kernel, grid, kThreads, kBytes, stream, true, p);
}

// False: not a problem of this kernel; nothing was launched.
template <class T>
bool launch_quads(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const int mode = quad_mode(p, sizeof(T), limits);
  if (mode < 0) return false;
  if (mode == kQuadGrouped) {
    launch_quad<T, 8, kQuadGrouped>(p, limits, stream);
  } else if (p.rows.E == 512) {
    launch_quad<T, 16, kQuadPlain>(p, limits, stream);
  } else if (p.rows.E == 128) {
    mode == kQuadBiased ? launch_quad<T, 4, kQuadBiased>(p, limits, stream) : launch_quad<T, 4, kQuadPlain>(p, limits, stream);
  } else {
    mode == kQuadBiased ? launch_quad<T, 8, kQuadBiased>(p, limits, stream) : launch_quad<T, 8, kQuadPlain>(p, limits, stream);
  }
  return true;
}

}  // namespace waybill::cuda
