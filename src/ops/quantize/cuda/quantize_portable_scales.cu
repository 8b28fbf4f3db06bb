// SPDX-License-Identifier: Apache-2.0
// The portable quantiser's first launch: scales, a warp a block. Grid: persistent; CTAs take rows of blocks.
#include "ops/quantize/cuda/quantize_portable.cuh"

namespace waybill::cuda {
namespace {

__device__ int group_of(const int* starts, int groups, int at) {
  int low = 0, high = groups;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (starts[middle] <= at ? low : high) = middle;
  }
  return low;
}

template <ElementFormat kFormat>
__global__ void quantize_portable_scales(const WideRows x, const CodedRows out) {
  extern __shared__ int memory[];
  GroupTable table;
  table.build<0>(x, memory);
  int* first_block = memory + x.groups + 1;
  count_blocks(table, x.groups, out.block_rows, first_block);
  const int num_blocks = first_block[x.groups], warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (num_blocks > out.scale_rows && x.status != nullptr) atomicOr(&x.status->flags, static_cast<unsigned>(kStatusBadOffsets));
  const int column_blocks = blocks_of(x.columns, out.block_columns);
  for (int b = static_cast<int>(blockIdx.x); b < min(static_cast<std::int64_t>(num_blocks), out.scale_rows); b += static_cast<int>(gridDim.x)) {
    const int g = group_of(first_block, x.groups, b), row0 = table.first_row(g) + (b - first_block[g]) * out.block_rows;
    const int rows = min(out.block_rows, table.end_row(g) - row0);
    for (int cb = warp; cb < column_blocks; cb += kThreads / 32) {
      const int column0 = cb * out.block_columns, columns = min(out.block_columns, x.columns - column0);
      std::uint32_t amax = 0;
      for (std::int64_t i = lane; i < static_cast<std::int64_t>(rows) * columns; i += 32) {
        amax = max(amax, __float_as_uint(load_value(x, row0 + i / columns, column0 + static_cast<int>(i % columns))) & kMagnitudeBits);
      }
      amax = ptx::redux_max(amax);
      if (lane != 0) continue;
      const BlockScale scale = block_scale<kFormat>(amax, out.scale, out.rule, out.group_scales != nullptr ? out.group_scales[g] : 1.0f);
      const std::int64_t at = b * out.scale_stride + cb * out.scale_column_stride;
      if (out.scale == ScaleFormat::kF32 || out.scale == ScaleFormat::kPowerOfTwo) {
        static_cast<float*>(out.scales)[at] = __uint_as_float(scale.stored);
      } else {
        static_cast<std::uint8_t*>(out.scales)[at] = static_cast<std::uint8_t>(scale.stored);
      }
    }
  }
}

template <ElementFormat kFormat>
void launch(const WideRows& x, const CodedRows& out, cudaStream_t stream) {
  quantize_portable_scales<kFormat><<<kGrid, kThreads, static_cast<unsigned>(GroupTable::bytes(x.groups, 1)), stream>>>(x, out);
}

}  // namespace

void launch_quantize_portable_scales(const WideRows& x, const CodedRows& out, cudaStream_t stream) {
  if (out.element == ElementFormat::kE4M3) launch<ElementFormat::kE4M3>(x, out, stream);
  if (out.element == ElementFormat::kE5M2) launch<ElementFormat::kE5M2>(x, out, stream);
  if (out.element == ElementFormat::kE2M1) launch<ElementFormat::kE2M1>(x, out, stream);
}

}  // namespace waybill::cuda
