// SPDX-License-Identifier: Apache-2.0
// Score sums of any rows: sum_partials [CTA, E] of the probabilities P_te of each expert and square_partials [CTA] of the squared logsumexps;
// their sum over the CTAs; and the values of the aux and z losses from it. No atomics, fixed orders: the results depend on the grid only.
//
// scores: a CTA takes 8 rows at a time. A warp finds the maximum and the score sum of its row; then every thread adds its columns of the 8
//   rows, in order, to its places in shared memory. Rows are read three times (from L1 and L2 after the first). Sums of at most 512 rows
//   are taken in fp32. Long fp32 rows have them from the forward kernel itself (router_forward_sums.cuh).
#include <algorithm>

#include "core/cuda/launch.h"
#include "ops/router/cuda/router_backward.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / 32;
static_assert(kScoreSumRows / kScoreSumCtas == 64 * kRows);

// An entry's score relative to the row's shift.
template <bool kSoftmax>
__device__ __forceinline__ float relative_score(int score, float x, float row_max, bool fast, bool deep) {
  if (kSoftmax) return exp_fast(x - row_max);
  if (!fast) return score_and_slope(score, x, row_max, deep).s;
  const float t = exp_fast(x);
  return t * ptx::rcp_approx(1.0f + t);
}

template <class T, bool kSoftmax>
__global__ void __launch_bounds__(kThreads) router_score_sums(const __grid_constant__ RouterSumParams p) {
  extern __shared__ float sums[];  // [E]
  __shared__ float row_max[kRows], scale[kRows];
  __shared__ double squares[kRows];
  const RouterRows& rows = p.rows;
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  for (int e = static_cast<int>(threadIdx.x); e < rows.E; e += kThreads) sums[e] = 0.0f;
  double square = 0.0;
  begin_kernel();
  await_previous();
  const RowFactors no_factors{nullptr, nullptr, 0.0f, rows.E};
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRows; first < p.num_rows; first += static_cast<std::int64_t>(gridDim.x) * kRows) {
    const std::int64_t t = p.first_row + first + warp;
    float largest = -kInfinity, inverse = 0.0f;
    if (first + warp < p.num_rows && !(rows.padding != nullptr && rows.padding[t] != 0)) {
      const T* row = static_cast<const T*>(rows.logits) + t * rows.row_stride;
      largest = generic_row_max(rows, row);
      if (largest > -kInfinity) {
        const RowSums s = generic_row_sums<T, kSoftmax>(rows, row, no_factors, largest);
        inverse = scalar::div(1.0f, s.score_sum);
        const double lse = static_cast<double>(row_lse<kSoftmax>(rows.score, s));
        square += lse * lse;
      }
    }
    if (lane == 0) row_max[warp] = largest, scale[warp] = inverse;
    __syncthreads();
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < rows.E; e += kThreads) {
      if (rows.mask != nullptr && rows.mask[e] != 0) continue;
      float sum = sums[e];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (scale[r] == 0.0f) continue;
        const float x = to_float(static_cast<const T*>(rows.logits)[(p.first_row + first + r) * rows.row_stride + e]);
        const bool fast = is_fast_row<kSoftmax>(rows.score, row_max[r]);
        const float score = scalar::is_finite(x) ? relative_score<kSoftmax>(rows.score, x, row_max[r], fast, row_max[r] < -30.0f) : 0.0f;
        sum = __fmaf_rn(score, scale[r], sum);
      }
      sums[e] = sum;
    }
    __syncthreads();
  }
  if (lane == 0) squares[warp] = square;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < rows.E; e += kThreads) p.sum_partials[static_cast<std::size_t>(blockIdx.x) * rows.E + e] = sums[e];
  if (threadIdx.x == 0) {
    double sum = 0.0;
    for (int w = 0; w < kRows; ++w) sum += squares[w];
    p.square_partials[blockIdx.x] = sum;
  }
}

// A CTA takes 32 columns; 32 warps share out the partial sums, so that few loads wait for each other.
constexpr int kReduceWarps = 32;
__global__ void __launch_bounds__(kReduceWarps * 32) router_reduce_sums(const __grid_constant__ RouterSumParams p) {
  __shared__ double of_warp[kReduceWarps][32];
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31, E = p.rows.E;
  const int e = static_cast<int>(blockIdx.x) * 32 + lane;
  begin_kernel();
  if (p.ready == nullptr) {
    await_previous();
  } else {  // the CTAs that are awaited run: this kernel's come when all of them have called begin_kernel()
    if (threadIdx.x == 0) {
      while (ptx::ld_acquire_sys(p.ready) != static_cast<std::uint32_t>(p.num_partials)) {
      }
    }
    __syncthreads();
  }
  double sum = 0.0;
  if (e < E) {
#pragma unroll 8
    for (int c = warp; c < p.num_partials; c += kReduceWarps) sum += static_cast<double>(__ldcg(p.sum_partials + static_cast<std::size_t>(c) * E + e));
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && e < E) {
    sum = 0.0;
#pragma unroll
    for (int w = 0; w < kReduceWarps; ++w) sum += of_warp[w][lane];
    p.sums[e] = p.accumulate != 0 ? p.sums[e] + sum : sum;
  }
  if (blockIdx.x == 0 && warp == 1) {
    double squares = 0.0;
    for (int c = lane; c < p.num_partials; c += 32) squares += __ldcg(p.square_partials + c);
    for (int step = 16; step > 0; step >>= 1) squares += __shfl_xor_sync(ptx::kFullWarp, squares, step);
    if (lane == 0) p.sums[E] = p.accumulate != 0 ? p.sums[E] + squares : squares;
  }
  if (p.ready != nullptr) {
    if (threadIdx.x != 0) return;
    if (ptx::atom_add_relaxed_gpu(p.readers, 1u) == gridDim.x - 1) *p.readers = 0, *p.ready = 0;
    if (blockIdx.x == 0) await_previous();  // what comes next on the stream relies on the end of both kernels
  }
}

constexpr int kValueThreads = 1024;
__global__ void __launch_bounds__(kValueThreads) router_losses_from_sums(const __grid_constant__ RouterLossParams p) {
  __shared__ double of_warp[kValueThreads / 32];
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  begin_kernel();
  LossFactors factors;
  if (threadIdx.x == 0 && p.valid_tokens == nullptr) factors = loss_factors(p, false);  // divisions of doubles, before there is something to wait for
  await_previous();
  double sum = 0.0;
  if (p.aux_counts != nullptr && p.aux_coefficient != 0.0f) {
#pragma unroll 4
    for (int e = static_cast<int>(threadIdx.x); e < p.rows.E; e += kValueThreads) {
      sum += static_cast<double>(__ldg(p.aux_counts + e)) * __ldg(p.score_sums + e);
    }
  }
  const double squares = threadIdx.x == 0 ? __ldg(p.score_sums + p.rows.E) : 0.0;
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(ptx::kFullWarp, sum, step);
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
  sum = of_warp[lane];
  for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(ptx::kFullWarp, sum, step);
  if (lane != 0) return;
  if (p.valid_tokens != nullptr) factors = loss_factors(p, false);
  factors.aux *= loss_weight(p, 0), factors.z *= loss_weight(p, 2);
  write_loss(p, 0, sum * static_cast<double>(factors.aux)), write_loss(p, 1, 0.0);
  write_loss(p, 2, p.z_coefficient != 0.0f ? squares * static_cast<double>(factors.z) : 0.0);
}

template <class T>
int launch(const RouterSumParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const bool softmax = p.rows.score == kScoreSoftmax || p.rows.score == kScoreSoftmaxSelected;
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>((p.num_rows + kRows - 1) / kRows, 1, kScoreSumCtas));
  const std::size_t smem = static_cast<std::size_t>(p.rows.E) * sizeof(float);
  launch_kernel(softmax ? router_score_sums<T, true> : router_score_sums<T, false>, grid, kThreads, smem, stream, limits.compute_major >= 9, p);
  return static_cast<int>(grid);
}

}  // namespace

int launch_router_score_sums(LogitType type, const RouterSumParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (type == LogitType::kF32) return launch<float>(p, limits, stream);
  return type == LogitType::kBF16 ? launch<__nv_bfloat16>(p, limits, stream) : launch<__half>(p, limits, stream);
}

void launch_router_reduce_sums(const RouterSumParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  launch_kernel(router_reduce_sums, static_cast<unsigned>((p.rows.E + 31) / 32), kReduceWarps * 32, 0, stream, limits.compute_major >= 9, p);
}

void launch_router_losses_from_sums(const RouterLossParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  launch_kernel(router_losses_from_sums, 1, kValueThreads, 0, stream, limits.compute_major >= 9, p);
}

}  // namespace waybill::cuda
