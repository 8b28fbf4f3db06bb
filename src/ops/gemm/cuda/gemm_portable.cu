// SPDX-License-Identifier: Apache-2.0
// Grid: (column tiles, row tiles) where rows are ragged, (column tiles, row tiles, groups) where k is; 256 threads, a tile of 64 x 64, 4 x 4
// elements a thread, 16 of k at a time through shared memory.
#include <cuda_bf16.h>

#include "core/cuda/ptx.cuh"
#include "ops/gemm/cuda/gemm_portable.h"

namespace waybill::cuda {
namespace {

constexpr int kTile = 64, kStep = 16, kThreads = 256;

__device__ float load(const PortableOperand& o, std::int64_t index) {
  return o.is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(o.data)[index]) : static_cast<const float*>(o.data)[index];
}

// Where row s is; -1: it is a zero row.
__device__ std::int64_t source_row(const PortableOperand& o, std::int64_t s) {
  if (o.rows == nullptr) return s;
  const std::int64_t row = o.rows[s];
  return row < o.num_rows ? row : -1;
}

__device__ void report(const PortableGemm& g, bool is_broken) {
  if (is_broken && g.status != nullptr) atomicOr(&g.status->flags, static_cast<unsigned>(kStatusBadOffsets));
}

// The group's rows, cut to the tensors; faults are reported.
__device__ int2 rows_of(const PortableGemm& g, int group) {
  const int limit = static_cast<int>(g.rows), first = g.offsets[group], last = g.offsets[group + 1];
  const int begin = min(max(first, 0), limit), end = min(max(last, begin), limit);
  report(g, first < 0 || last != end || (group == 0 && first != 0));
  return make_int2(begin, end);
}

__device__ void multiply(const PortableGemm& g, float (&sum)[4][4], int group, std::int64_t i0, std::int64_t m, std::int64_t j0, int2 rows) {
  __shared__ float a[kStep][kTile + 1], b[kStep][kTile + 1];
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t k_end = g.is_k_ragged ? rows.y - rows.x : g.k;
  for (std::int64_t k0 = 0; k0 < k_end; k0 += kStep) {
    for (int e = thread; e < kTile * kStep; e += kThreads) {
      const int outer = e / kStep, step = e % kStep;
      const std::int64_t k = k0 + step, i = i0 + outer, j = j0 + outer;
      float va = 0, vb = 0;
      if (g.is_k_ragged) {
        // -1 in either list: the row adds nothing, whatever the other operand holds.
        const std::int64_t s = rows.x + k, ra = k < k_end ? source_row(g.a, s) : -1, rb = k < k_end ? source_row(g.b, s) : -1;
        const bool is_row = ra >= 0 && rb >= 0;
        if (is_row && i < m) va = load(g.a, ra * g.a.k_stride + i * g.a.outer_stride);
        if (is_row && j < g.n) vb = load(g.b, rb * g.b.k_stride + j * g.b.outer_stride);
      } else {
        const std::int64_t row = i < m ? source_row(g.a, rows.x + i) : -1;
        if (k < k_end && row >= 0) va = load(g.a, row * g.a.outer_stride + k * g.a.k_stride);
        if (k < k_end && j < g.n) vb = load(g.b, group * g.b.group_stride + j * g.b.outer_stride + k * g.b.k_stride);
      }
      a[step][outer] = va, b[step][outer] = vb;
    }
    __syncthreads();
    for (int step = 0; step < kStep; ++step) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
#pragma unroll
        for (int y = 0; y < 4; ++y) sum[x][y] = fmaf(a[step][thread / 16 * 4 + x], b[step][thread % 16 * 4 + y], sum[x][y]);
      }
    }
    __syncthreads();
  }
}

__global__ void gemm_portable(const __grid_constant__ PortableGemm g) {
  int group = static_cast<int>(blockIdx.z);
  std::int64_t tile = blockIdx.y;
  int2 rows = make_int2(0, 0);
  if (g.is_k_ragged) {
    rows = rows_of(g, group);
  } else {
    for (group = 0; group < g.groups; ++group) {
      rows = rows_of(g, group);
      const std::int64_t tiles = (rows.y - rows.x + kTile - 1) / kTile;
      if (tile < tiles) break;
      tile -= tiles;
    }
    if (group == g.groups) return;
  }
  const std::int64_t m = g.is_k_ragged ? g.m : rows.y - rows.x, i0 = tile * kTile, j0 = static_cast<std::int64_t>(blockIdx.x) * kTile;
  float sum[4][4] = {};
  multiply(g, sum, group, i0, m, j0, rows);
  for (int x = 0; x < 4; ++x) {
    for (int y = 0; y < 4; ++y) {
      const std::int64_t i = i0 + threadIdx.x / 16 * 4 + x, j = j0 + threadIdx.x % 16 * 4 + y;
      if (i >= m || j >= g.n) continue;
      const bool is_padding = !g.is_k_ragged && source_row(g.a, rows.x + i) < 0;
      const std::int64_t at = g.is_k_ragged ? group * g.d_group_stride + i * g.d_row_stride + j : (rows.x + i) * g.n + j;
      float value = sum[x][y];
      if (g.bias != nullptr && !is_padding) value += g.bias[group * g.n + j];
      if (g.accumulate) value += static_cast<const float*>(g.d)[at];
      if (g.d_is_bf16) {
        static_cast<__nv_bfloat16*>(g.d)[at] = __float2bfloat16_rn(value);
      } else {
        static_cast<float*>(g.d)[at] = value;
      }
    }
  }
}

// Grid: (32 columns, groups); 32 x 16 threads: lane = column, 16 rows at a time, their sums added in order.
__global__ void bias_grad(const BiasGrad p) {
  __shared__ float part[16][33];
  const int group = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const std::int64_t n = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;
  const std::int64_t begin = min(max(static_cast<std::int64_t>(p.offsets[group]), std::int64_t{0}), p.num_rows);
  const std::int64_t end = min(max(static_cast<std::int64_t>(p.offsets[group + 1]), begin), p.num_rows);
  float sum = 0;
  if (n < p.n) {
#pragma unroll 4
    for (std::int64_t s = begin + line; s < end; s += 16) {
      const bool is_row = p.rows == nullptr || (p.rows[s] >= 0 && p.rows[s] < p.list_rows);
      const std::int64_t at = s * p.n + n;
      sum += !is_row ? 0.0f : (p.is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.dy)[at]) : static_cast<const float*>(p.dy)[at]);
    }
  }
  part[line][lane] = sum;
  __syncthreads();
  if (line != 0 || n >= p.n) return;
  for (int l = 1; l < 16; ++l) sum += part[l][lane];
  float& out = p.d_bias[group * p.n + n];
  out = p.accumulate ? out + sum : sum;
}

unsigned blocks(std::int64_t count, std::int64_t per) { return static_cast<unsigned>((count + per - 1) / per); }

}  // namespace

void launch_gemm_portable(const PortableGemm& g, cudaStream_t stream) {
  if (g.groups == 0 || g.n == 0 || (g.is_k_ragged ? g.m == 0 : g.rows == 0)) return;
  const dim3 grid(blocks(g.n, kTile), g.is_k_ragged ? blocks(g.m, kTile) : static_cast<unsigned>(g.rows / kTile + g.groups),
                  g.is_k_ragged ? static_cast<unsigned>(g.groups) : 1u);
  gemm_portable<<<grid, kThreads, 0, stream>>>(g);
}

void launch_bias_grad(const BiasGrad& grad, cudaStream_t stream) {
  if (grad.groups == 0 || grad.n == 0) return;
  if (takes_bias_grad_bf16(grad)) return launch_bias_grad_bf16(grad, stream);
  bias_grad<<<dim3(blocks(grad.n, 32), static_cast<unsigned>(grad.groups)), dim3(32, 16), 0, stream>>>(grad);
}

}  // namespace waybill::cuda
