// SPDX-License-Identifier: Apache-2.0
// NVFP4's scale of a group, 448 * 6 / (its largest magnitude): one pass over x, 2 or 4 bytes an element read. Grid: persistent, 256 threads;
// a CTA takes 8 rows at a time, a warp a row, and adds its maximum to the group's by an atomic maximum of bits, whose order does not matter. A second
// launch turns magnitudes into scales (group_scales_finish.cu). A NaN counts for nothing here: it spoils its block only.
#include "ops/quantize/cuda/codec.cuh"
#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/launch_grid.h"
#include "ops/quantize/cuda/wide_rows.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kRows = 8, kUnderWay = 4;

__device__ __forceinline__ std::uint32_t number(std::uint32_t bits) {
  const std::uint32_t magnitude = bits & kMagnitudeBits;
  return magnitude > kInfinityBits ? 0 : magnitude;
}
__device__ __forceinline__ std::uint32_t number_pair(std::uint32_t pair) { return max(number(pair << 16), number(pair & 0xffff0000u)); }

// Rows [begin, end), a warp a row; is_wide: pieces of 16 bytes.
__device__ std::uint32_t largest(const WideRows& x, int begin, int end, bool is_wide) {
  std::uint32_t amax = 0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = begin + static_cast<int>(threadIdx.x) / 32; row < end; row += kThreads / 32) {
    const std::int64_t source = source_row(x, row);
    if (source < 0) continue;
    if (!is_wide) {
      for (int c = lane; c < x.columns; c += 32) amax = max(amax, number(__float_as_uint(load_value(x, row, c))));
      continue;
    }
    const std::uint8_t* from = static_cast<const std::uint8_t*>(x.data) + source * x.stride * (x.is_bf16 ? 2 : 4);
    const std::int64_t bytes = std::int64_t{x.columns} * (x.is_bf16 ? 2 : 4);
    for (std::int64_t at = 16 * lane; at < bytes; at += kUnderWay * 512) {
      uint4 v[kUnderWay];
#pragma unroll
      for (int i = 0; i < kUnderWay; ++i) v[i] = at + 512 * i < bytes ? ptx::ld_stream_v4(from + at + 512 * i) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kUnderWay; ++i) {
        amax = x.is_bf16 ? max(max(amax, number_pair(v[i].x)), max(number_pair(v[i].y), max(number_pair(v[i].z), number_pair(v[i].w))))
                         : max(max(amax, number(v[i].x)), max(number(v[i].y), max(number(v[i].z), number(v[i].w))));
      }
    }
  }
  return amax;
}

__global__ void __launch_bounds__(kThreads) group_scales_amax(const WideRows x, std::uint32_t* amax_bits, bool is_wide) {
  extern __shared__ int memory[];
  GroupTable table;
  table.build<0>(x, memory);
  for (int begin = static_cast<int>(blockIdx.x) * kRows; begin < table.rows(); begin += static_cast<int>(gridDim.x) * kRows) {
    const int end = min(begin + kRows, table.rows());
    for (int row = begin; row < end;) {
      const int g = table.group_of_row(row), stop = max(min(end, table.end_row(g)), row + 1);
      const std::uint32_t amax = ptx::redux_max(largest(x, row, stop, is_wide));
      if (threadIdx.x % 32 == 0) atomicMax(amax_bits + g, amax);
      row = stop;
    }
  }
}

}  // namespace

void launch_group_scales(const WideRows& x, float* group_scales, cudaStream_t stream) {
  if (x.groups == 0) return;
  if (x.rows > 0 && x.columns > 0) {
    const std::int64_t per = x.is_bf16 ? 8 : 4;
    const bool is_wide = x.columns % per == 0 && x.stride % per == 0 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
    group_scales_amax<<<static_cast<unsigned>(num_sms() * 8), kThreads, static_cast<unsigned>(GroupTable::bytes(x.groups, 0)), stream>>>(
        x, reinterpret_cast<std::uint32_t*>(group_scales), is_wide);
  }
  launch_group_scales_finish(group_scales, x.groups, stream);
}

}  // namespace waybill::cuda
