// SPDX-License-Identifier: Apache-2.0
// Dequantises NVFP4 in blocks of 16 rows x 1 to bf16. A lane takes a block of 8 adjacent columns: their codes are turned around in registers, so that a
// column's values, computed once for the block, are picked by byte permutations (wide_codes.cuh). Grid: persistent, 256 threads; a warp takes 16 rows of a
// group x 256 columns. Bytes: codes and scales once, y once.
#include <algorithm>

#include "ops/quantize/cuda/widen.cuh"

namespace waybill::cuda {
namespace {

constexpr int kCtas = 2;  // an SM
constexpr int kBlockRows = 16, kStrips = kBlockRows / 8;

// Eight rows of eight codes, the first column in the lowest bits, to eight columns of eight codes, the first row in the lowest bits.
__device__ __forceinline__ void turn_codes(const std::uint32_t (&rows)[8], std::uint32_t (&columns)[8]) {
  std::uint32_t even[4], odd[4];  // byte k: of columns 2 k, 2 k + 1, two rows each
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t a = rows[2 * i], b = rows[2 * i + 1];
    even[i] = (a & 0x0f0f0f0fu) | (b << 4 & 0xf0f0f0f0u), odd[i] = (a >> 4 & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u);
  }
#pragma unroll
  for (int parity = 0; parity < 2; ++parity) {
    const std::uint32_t(&w)[4] = parity == 0 ? even : odd;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t first = ptx::permute_bytes(w[0], w[1], half == 0 ? 0x5140 : 0x7362),
                          last = ptx::permute_bytes(w[2], w[3], half == 0 ? 0x5140 : 0x7362);
      columns[4 * half + parity] = ptx::permute_bytes(first, last, 0x5410), columns[4 * half + 2 + parity] = ptx::permute_bytes(first, last, 0x7632);
    }
  }
}

__global__ void __launch_bounds__(kThreads, kCtas) widen_columns_nvfp4(const WideRows y, const CodedRows in, const WidenGrid grid) {
  extern __shared__ int memory[];
  GroupTable table;
  table.build<kBlockRows>(y, memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int num_units = static_cast<int>(min(static_cast<std::int64_t>(table.num_blocks()), in.scale_rows)) * grid.segments;
  for (int unit = static_cast<int>(blockIdx.x) * kWarps + warp; unit < num_units; unit += static_cast<int>(gridDim.x) * kWarps) {
    const int block = grid.row_of(unit), column = (unit - block * grid.segments) * kWarpColumns + 8 * lane, g = table.group_of_block(block);
    const int row0 = table.first_row(g) + (block - table.first_block(g)) * kBlockRows, valid = min(table.end_row(g) - row0, kBlockRows);
    if (column >= y.columns) continue;
    std::uint32_t rows[kStrips][8] = {}, columns[kStrips][8];
    const std::uint8_t* from = in.codes + row0 * in.code_stride + column / 2;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      if (i < valid) rows[i / 8][i % 8] = __ldg(reinterpret_cast<const unsigned*>(from + i * in.code_stride));
    }
    const uint2 bytes = __ldg(reinterpret_cast<const uint2*>(static_cast<const std::uint8_t*>(in.scales) + block * in.scale_stride + column));
    const float group = __ldg(in.group_scales + g), reciprocal = group_reciprocal(group);
#pragma unroll
    for (int s = 0; s < kStrips; ++s) turn_codes(rows[s], columns[s]);
    std::uint32_t words[kBlockRows][4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint2 of_columns[2][kBlockRows / 4];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const std::uint32_t scale = (pair < 2 ? bytes.x : bytes.y) >> (8 * (2 * pair % 4 + c)) & 0xffu;
        const E2m1Values values = E2m1Values::of(decode_one<ElementFormat::kE4M3>(scale), group, reciprocal);
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
          of_columns[c][2 * s] = values.four(columns[s][2 * pair + c]), of_columns[c][2 * s + 1] = values.four(columns[s][2 * pair + c] >> 16);
        }
      }
#pragma unroll
      for (int q = 0; q < kBlockRows / 4; ++q) {
        const uint2 low = of_columns[0][q], high = of_columns[1][q];
        words[4 * q][pair] = ptx::permute_bytes(low.x, high.x, 0x5410), words[4 * q + 1][pair] = ptx::permute_bytes(low.x, high.x, 0x7632);
        words[4 * q + 2][pair] = ptx::permute_bytes(low.y, high.y, 0x5410), words[4 * q + 3][pair] = ptx::permute_bytes(low.y, high.y, 0x7632);
      }
    }
    std::uint16_t* to = static_cast<std::uint16_t*>(y.data) + row0 * y.stride + column;
#pragma unroll
    for (int i = 0; i < kBlockRows; ++i) {
      if (i < valid) *reinterpret_cast<uint4*>(to + i * y.stride) = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
    }
  }
}

}  // namespace

void launch_widen_columns_nvfp4(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  const WidenGrid grid = widen_grid(y, in);
  const std::int64_t units = (y.rows / kBlockRows + y.groups) * grid.segments;
  const auto ctas = static_cast<unsigned>(std::min<std::int64_t>((units + kWarps - 1) / kWarps, num_sms() * kCtas));
  widen_columns_nvfp4<<<ctas, kThreads, static_cast<unsigned>(GroupTable::bytes(y.groups, 1)), stream>>>(y, in, grid);
}

}  // namespace waybill::cuda
