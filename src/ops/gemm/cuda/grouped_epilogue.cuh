// SPDX-License-Identifier: Apache-2.0
// From a warpgroup's accumulators to D. Each warp turns its 16 rows around in shared memory of its own, 128 bytes of each row at a time, and
// the copy engine stores (or adds) them while the warp goes on; no barrier beyond the warp. Where some of the 16 rows lie behind the group's
// end the lanes store themselves, 8 of them 128 adjacent bytes. D's last column stops both.
//
// Lane layout of m64nN accumulators: thread t holds, of rows 16 * (t / 32) + (t % 32) / 4 and that + 8, columns 8 j + 2 (t % 4) + {0, 1} in
// acc[4 j + {0, 1}] and acc[4 j + {2, 3}].
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

// A buffer: 16 rows of 128 bytes; 16-byte piece c of row r lies at piece c ^ (r & 7): the copy engine's swizzle, without bank conflicts.
__device__ __forceinline__ std::uint32_t piece_offset(int row, int piece) { return static_cast<std::uint32_t>(row * 128 + ((piece ^ (row & 7)) << 4)); }

// Columns 64 `group` .. + 63 of the warp's rows as bf16.
template <int kBlockN>
__device__ __forceinline__ void fill_bf16(const float (&acc)[kBlockN / 2], int group, std::uint8_t* buffer, int lane) {
  const int matrix = lane / 8, row = (matrix & 1) * 8 + lane % 8;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int at = 4 * (8 * group + j);
    ptx::store_matrix_x4(ptx::smem_address(buffer) + piece_offset(row, j + (matrix >> 1)), pack_bf16(acc[at], acc[at + 1]), pack_bf16(acc[at + 2], acc[at + 3]),
                         pack_bf16(acc[at + 4], acc[at + 5]), pack_bf16(acc[at + 6], acc[at + 7]));
  }
}

// Columns 32 `group` .. + 31 of the warp's rows as fp32.
template <int kBlockN>
__device__ __forceinline__ void fill_f32(const float (&acc)[kBlockN / 2], int group, std::uint8_t* buffer, int lane) {
  const int row = lane / 4, q = lane % 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int at = 4 * (4 * group + j);
    *reinterpret_cast<float2*>(buffer + piece_offset(row, 2 * j + q / 2) + 8 * (q & 1)) = make_float2(acc[at], acc[at + 1]);
    *reinterpret_cast<float2*>(buffer + piece_offset(row + 8, 2 * j + q / 2) + 8 * (q & 1)) = make_float2(acc[at + 2], acc[at + 3]);
  }
}

// Where a warp stores: its first row (of D's rows, in plane `plane`) and the tile's first column; `rows` of its 16 rows exist, `columns` of
// the tile's columns.
struct WarpTarget {
  int plane, row, column, rows, columns, lane;
  std::int64_t first;  // element (row, column) of D
};

template <int kBlockN, GemmOutput kOutput>
__device__ __forceinline__ void fill_buffer(const float (&acc)[kBlockN / 2], int group, std::uint8_t* buffer, int lane) {
  if constexpr (kOutput == GemmOutput::kBf16) {
    fill_bf16<kBlockN>(acc, group, buffer, lane);
  } else {
    fill_f32<kBlockN>(acc, group, buffer, lane);
  }
}

// A filled buffer by the lanes, for rows that do not all exist.
template <GemmOutput kOutput>
__device__ __forceinline__ void store_by_lanes(const std::uint8_t* buffer, const GroupedParams& p, const WarpTarget& to, int group) {
  constexpr int kSize = kOutput == GemmOutput::kBf16 ? 2 : 4, kColumns = 128 / kSize;
  std::int64_t first = to.first;
  ptx::hide(first);  // or the addresses of all groups are held in registers at once
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + to.lane / 8, column = group * kColumns + to.lane % 8 * (16 / kSize);
    const uint4 v = *reinterpret_cast<const uint4*>(buffer + piece_offset(row, to.lane % 8));
    if (row >= to.rows || column >= to.columns) continue;
    std::uint8_t* out = static_cast<std::uint8_t*>(p.d_data) + (first + row * p.d_stride + column) * kSize;
    if constexpr (kOutput == GemmOutput::kAddF32) {
      ptx::red_add_v4(reinterpret_cast<float*>(out), make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)));
    } else {
      *reinterpret_cast<uint4*>(out) = v;
    }
  }
}

template <GemmOutput kOutput>
__device__ __forceinline__ void store_by_copy_engine(const std::uint8_t* buffer, const GroupedParams& p, const WarpTarget& to, int group) {
  constexpr int kColumns = kOutput == GemmOutput::kBf16 ? 64 : 32;
  if constexpr (kOutput == GemmOutput::kAddF32) {
    ptx::tensor_add_3d(&p.d, buffer, to.column + group * kColumns, to.row, to.plane);
  } else {
    ptx::tensor_store_3d(&p.d, buffer, to.column + group * kColumns, to.row, to.plane);
  }
}

// fp32 results: buffers in turn, each filled when the copy engine has read what it held. bf16 results: all buffers at a time under one memory fence, which
// takes longer than filling them. Columns kFirst .. kLast - 1 of the tile.
template <int kBlockN, GemmOutput kOutput, int kBuffers, int kFirst = 0, int kLast = kBlockN>
__device__ __forceinline__ void store_tile(const float (&acc)[kBlockN / 2], std::uint8_t* buffers, const GroupedParams& p, const WarpTarget& to) {
  constexpr int kColumns = kOutput == GemmOutput::kBf16 ? 64 : 32, kAtOnce = kOutput == GemmOutput::kBf16 ? kBuffers : 1;
  static_assert(kFirst % (kColumns * kBuffers) == 0 && kLast % (kColumns * kBuffers) == 0, "buffers are used in turn");
  const bool by_copy_engine = to.rows >= gemm_limits::kBufferRows;
#pragma unroll
  for (int first = kFirst / kColumns; first < kLast / kColumns; first += kAtOnce) {
    std::uint8_t* buffer = buffers + first % kBuffers * gemm_limits::kBufferBytes;
    if (to.lane == 0) ptx::bulk_wait_read<kBuffers - kAtOnce>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) fill_buffer<kBlockN, kOutput>(acc, first + i, buffer + i * gemm_limits::kBufferBytes, to.lane);
    if (by_copy_engine) {
      ptx::fence_async_proxy();
      __syncwarp();
      if (to.lane == 0) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) store_by_copy_engine<kOutput>(buffer + i * gemm_limits::kBufferBytes, p, to, first + i);
      }
    } else {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) store_by_lanes<kOutput>(buffer + i * gemm_limits::kBufferBytes, p, to, first + i);
      __syncwarp();
    }
    // Also an empty group counts, so that waiting for all but the last few finds the right ones.
    if (to.lane == 0) ptx::bulk_commit();
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

// low, high: whether this thread's rows take the bias. Columns kFirst .. kLast - 1 of the tile.
template <int kBlockN, int kFirst = 0, int kLast = kBlockN>
__device__ __forceinline__ void add_bias(float (&acc)[kBlockN / 2], const float* bias, int columns, int q, bool low, bool high) {
#pragma unroll
  for (int j = kFirst / 8; j < kLast / 8; ++j) {
    const int column = 8 * j + 2 * q;
    const float2 b = column < columns ? __ldg(reinterpret_cast<const float2*>(bias + column)) : make_float2(0, 0);
    if (low) acc[4 * j] += b.x, acc[4 * j + 1] += b.y;
    if (high) acc[4 * j + 2] += b.x, acc[4 * j + 3] += b.y;
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

// acc += the partial sums of another slice. 8 loads of a thread are under way together (more cost spills).
template <int kBlockN>
__device__ __forceinline__ void add_partial(float (&acc)[kBlockN / 2], const float* partial, int thread) {
  constexpr int kGroup = 8;
#pragma unroll
  for (int first = 0; first < kBlockN / 8; first += kGroup) {
    float4 v[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = __ldcg(reinterpret_cast<const float4*>(partial) + (first + i) * 128 + thread);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int at = 4 * (first + i);
      acc[at] += v[i].x, acc[at + 1] += v[i].y, acc[at + 2] += v[i].z, acc[at + 3] += v[i].w;
    }
    asm volatile("" ::: "memory");  // the next loads stay behind
  }
}

}  // namespace waybill::cuda
