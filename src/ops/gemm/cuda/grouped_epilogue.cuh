// SPDX-License-Identifier: Apache-2.0
// From a warpgroup's accumulators to D: no shared memory, no barrier, 16-byte stores that stop at the group's last row and D's last column.
//
// Lane layout of m64nN accumulators: thread t holds, of rows 16 * (t / 32) + (t % 32) / 4 and that + 8, columns 8 j + 2 (t % 4) + {0, 1} in
// acc[4 j + {0, 1}] and acc[4 j + {2, 3}]. The four lanes of a row exchange values so that each stores 16 adjacent bytes.
#pragma once

#include <cuda_bf16.h>

#include "core/cuda/ptx.cuh"
#include "ops/gemm/cuda/grouped_params.h"

namespace waybill::cuda {

__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  unsigned bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

// Lane q of four holds column pair q of blocks 0..3 (8 columns each); afterwards it holds all four pairs of block q.
__device__ __forceinline__ uint4 transpose_quad(unsigned b0, unsigned b1, unsigned b2, unsigned b3, int q) {
  const bool odd = (q & 1) != 0, high = (q & 2) != 0;
  const unsigned from_low = __shfl_xor_sync(ptx::kFullWarp, odd ? b0 : b1, 1), from_high = __shfl_xor_sync(ptx::kFullWarp, odd ? b2 : b3, 1);
  const unsigned low0 = odd ? from_low : b0, low1 = odd ? b1 : from_low;      // block q & 1: the pairs of this half of the quad
  const unsigned high0 = odd ? from_high : b2, high1 = odd ? b3 : from_high;  // block 2 + (q & 1)
  const unsigned got0 = __shfl_xor_sync(ptx::kFullWarp, high ? low0 : high0, 2), got1 = __shfl_xor_sync(ptx::kFullWarp, high ? low1 : high1, 2);
  return high ? make_uint4(got0, got1, high0, high1) : make_uint4(low0, low1, got0, got1);
}

// Rows `row` and row + 8 of this thread; `valid` of the warpgroup's 64 rows exist. d: row 0, column 0 of the warpgroup's block.
template <int kBlockN>
__device__ __forceinline__ void store_bf16(const float (&acc)[kBlockN / 2], __nv_bfloat16* d, std::int64_t stride, int row, int valid, int columns, int q) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __nv_bfloat16* out = d + (row + 8 * half) * stride + 8 * q;
    const bool is_row = row + 8 * half < valid;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; j += 4) {
      const int at = 4 * j + 2 * half;
      const uint4 v = transpose_quad(pack_bf16(acc[at], acc[at + 1]), pack_bf16(acc[at + 4], acc[at + 5]), pack_bf16(acc[at + 8], acc[at + 9]),
                                     pack_bf16(acc[at + 12], acc[at + 13]), q);
      if (is_row && 8 * (j + q) < columns) *reinterpret_cast<uint4*>(out + 8 * j) = v;
    }
  }
}

template <int kBlockN, bool kAdd>
__device__ __forceinline__ void store_f32(const float (&acc)[kBlockN / 2], float* d, std::int64_t stride, int row, int valid, int columns, int q) {
  const bool odd = (q & 1) != 0;
  const int column = 8 * (q & 1) + 4 * (q >> 1);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* out = d + (row + 8 * half) * stride + column;
    const bool is_row = row + 8 * half < valid;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; j += 2) {
      const int at = 4 * j + 2 * half;  // even lanes store four columns of block j, odd lanes of block j + 1
      const float x = __shfl_xor_sync(ptx::kFullWarp, odd ? acc[at] : acc[at + 4], 1), y = __shfl_xor_sync(ptx::kFullWarp, odd ? acc[at + 1] : acc[at + 5], 1);
      const float4 v = odd ? make_float4(x, y, acc[at + 4], acc[at + 5]) : make_float4(acc[at], acc[at + 1], x, y);
      if (!is_row || 8 * j + column >= columns) continue;
      if constexpr (kAdd) {
        ptx::red_add_v4(out + 8 * j, v.x, v.y, v.z, v.w);
      } else {
        *reinterpret_cast<float4*>(out + 8 * j) = v;
      }
    }
  }
}

template <int kBlockN, GemmOutput kOutput>
__device__ __forceinline__ void store_tile(const float (&acc)[kBlockN / 2], void* d, std::int64_t first, std::int64_t stride, int thread, int valid,
                                           int columns) {
  const int row = 16 * (thread / 32) + (thread % 32) / 4, q = thread % 4;
  if constexpr (kOutput == GemmOutput::kBf16) {
    store_bf16<kBlockN>(acc, static_cast<__nv_bfloat16*>(d) + first, stride, row, valid, columns, q);
  } else {
    store_f32<kBlockN, kOutput == GemmOutput::kAddF32>(acc, static_cast<float*>(d) + first, stride, row, valid, columns, q);
  }
}

// The block of a group without rows.
template <int kBlockN, GemmOutput kOutput>
__device__ __forceinline__ void store_zeros(void* d, std::int64_t first, std::int64_t stride, int thread, int valid, int columns) {
  constexpr int kSize = kOutput == GemmOutput::kBf16 ? 2 : 4, kPerStore = 16 / kSize, kStores = kBlockN / kPerStore;
  for (int i = thread; i < 64 * kStores; i += 128) {
    const int row = i / kStores, column = i % kStores * kPerStore;
    if (row >= valid || column >= columns) continue;
    *reinterpret_cast<uint4*>(static_cast<std::uint8_t*>(d) + (first + row * stride + column) * kSize) = make_uint4(0, 0, 0, 0);
  }
}

template <int kBlockN>
__device__ __forceinline__ void add_bias(float (&acc)[kBlockN / 2], const float* bias, int columns, int q) {
#pragma unroll
  for (int j = 0; j < kBlockN / 8; ++j) {
    const int column = 8 * j + 2 * q;
    const float2 b = column < columns ? __ldg(reinterpret_cast<const float2*>(bias + column)) : make_float2(0, 0);
    acc[4 * j] += b.x, acc[4 * j + 1] += b.y, acc[4 * j + 2] += b.x, acc[4 * j + 3] += b.y;
  }
}

// A slice's partial sums: 64 x kBlockN floats in the layout of the accumulators, a float4 a thread and step.
template <int kBlockN>
__device__ __forceinline__ void write_partial(const float (&acc)[kBlockN / 2], float* partial, int thread) {
#pragma unroll
  for (int i = 0; i < kBlockN / 8; ++i) {
    __stcg(reinterpret_cast<float4*>(partial) + i * 128 + thread, make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
  }
}

// acc = the sum over slices, in the order of the slices. 8 loads of a thread are under way together (16 cost spills).
template <int kBlockN>
__device__ __forceinline__ void sum_partials(float (&acc)[kBlockN / 2], const float* partials, std::int64_t stride, int num_slices, int thread) {
  constexpr int kGroup = 8;
  static_assert(kBlockN / 8 % kGroup == 0);
#pragma unroll
  for (int first = 0; first < kBlockN / 8; first += kGroup) {
    const float4* partial = reinterpret_cast<const float4*>(partials) + first * 128 + thread;
#pragma unroll
    for (int i = 4 * first; i < 4 * (first + kGroup); ++i) acc[i] = 0;
#pragma unroll 1
    for (int s = 0; s < num_slices; ++s, partial += stride / 4) {
      float4 v[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) v[i] = __ldcg(partial + i * 128);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int at = 4 * (first + i);
        acc[at] += v[i].x, acc[at + 1] += v[i].y, acc[at + 2] += v[i].z, acc[at + 3] += v[i].w;
      }
    }
  }
}

}  // namespace waybill::cuda
