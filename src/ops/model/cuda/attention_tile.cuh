// SPDX-License-Identifier: Apache-2.0
// What the attention kernels share. A CTA has 32 rows of its own, 4 a warp, and walks over tiles of 32 rows of the other side: lane l of every warp has
// row l of the tile. In the forward pass and for dq the own rows are queries and the tile holds keys; for dk and dv it is the other way round.
#pragma once

#include "core/cuda/block_sum.cuh"
#include "ops/model/cuda/model_kernels.h"

namespace waybill::cuda::attention {

inline constexpr int kTile = 32, kThreads = 256, kRows = kTile / (kThreads / 32);  // rows a warp

// Rows of one head of one sequence in a [T, heads, D] tensor.
struct HeadRows {
  const float* data;
  std::int64_t stride, count;
};
__device__ __forceinline__ std::int64_t head_offset(const AttentionCall& c, std::int64_t heads, std::int64_t b, std::int64_t h) {
  return (b * c.seq_len * heads + h) * c.D;
}
__device__ __forceinline__ HeadRows head_rows(const float* x, const AttentionCall& c, std::int64_t heads, std::int64_t b, std::int64_t h) {
  return {x + head_offset(c, heads, b, h), heads * c.D, c.seq_len};
}

// Shared memory of a tile: 32 rows of D + 1 floats, so that 32 lanes that read a column meet 32 banks. Rows past the end are 0.
inline __host__ __device__ int tile_floats(int D) { return kTile * (D + 1); }
__device__ __forceinline__ void load_tile(float* tile, const HeadRows& rows, std::int64_t first, int D) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * D; i += kThreads) {
    const int r = i / D, d = i % D;
    tile[r * (D + 1) + d] = first + r < rows.count ? rows.data[(first + r) * rows.stride + d] : 0.0f;
  }
}

// out[r] = <own row r of this warp, this lane's row of the tile>.
__device__ __forceinline__ void dots(float (&out)[kRows], const float* own, const float* tile, int D) {
  const float* mine = tile + (threadIdx.x % 32) * (D + 1);
  const float* rows = own + (threadIdx.x / 32) * kRows * (D + 1);
#pragma unroll
  for (int r = 0; r < kRows; ++r) out[r] = 0.0f;
#pragma unroll 4
  for (int d = 0; d < D; ++d) {
    const float x = mine[d];
#pragma unroll
    for (int r = 0; r < kRows; ++r) out[r] = fmaf(rows[r * (D + 1) + d], x, out[r]);
  }
}

// sum[r][j] += sum over tile rows n of weight(r, n) * tile[n][lane + 32 j]; lane n holds weight[r] of tile row n.
template <int kColumns>
__device__ __forceinline__ void add_weighted(float (&sum)[kRows][kColumns], const float (&weight)[kRows], const float* tile, int D) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 2
  for (int n = 0; n < kTile; ++n) {
    float w[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) w[r] = __shfl_sync(ptx::kFullWarp, weight[r], n);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float x = lane + 32 * j < D ? tile[n * (D + 1) + lane + 32 * j] : 0.0f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[r][j] = fmaf(w[r], x, sum[r][j]);
    }
  }
}

// Writes this warp's rows: row `first` + r of the head, times scale[r].
template <int kColumns>
__device__ __forceinline__ void store_rows(float* data, std::int64_t stride, std::int64_t first, std::int64_t count, const float (&sum)[kRows][kColumns],
                                           const float (&scale)[kRows], int D) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= count) continue;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int d = static_cast<int>(threadIdx.x) % 32 + 32 * j;
      if (d < D) data[(first + r) * stride + d] = sum[r][j] * scale[r];
    }
  }
}

// kernel<columns of 32>(...) for this head width.
template <class Launch>
void dispatch_columns(int D, const Launch& launch) {
  if (D <= 32) return launch.template operator()<1>();
  if (D <= 64) return launch.template operator()<2>();
  if (D <= 128) return launch.template operator()<4>();
  launch.template operator()<8>();
}

// Allows more than 48 KB of shared memory where a kernel needs it.
template <class Kernel>
void launch_tiles(Kernel kernel, dim3 grid, int tiles, const AttentionCall& c, cudaStream_t stream) {
  const auto bytes = static_cast<std::size_t>(tiles * tile_floats(c.D)) * sizeof(float);
  (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  kernel<<<grid, kThreads, bytes, stream>>>(c);
}

}  // namespace waybill::cuda::attention
