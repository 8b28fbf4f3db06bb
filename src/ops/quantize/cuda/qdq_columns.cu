// SPDX-License-Identifier: Apache-2.0
// qdq.h, blocks along the rows: 32 x 1 (MXFP8), 16 x 1 (NVFP4, rotated or not) and 16 x 16 (NVFP4). Grid: persistent, 256 threads; a warp takes 32 rows of
// a group x 64 columns, a lane 16 rows x 4 columns in registers: a rotation and a column's block of 16 never leave the lane. Bytes: x once, y once.
#include "ops/quantize/cuda/qdq_tile.cuh"
#include "ops/quantize/cuda/wide_codes.cuh"

namespace waybill::cuda {
namespace {

enum class Shape : int { k32x1, k16x1, k16x16 };

// Bits of the largest magnitude of each pair of columns, packed as the values are.
__device__ __forceinline__ std::uint32_t largest_pair(const Values& x, int pair) {
  std::uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) m = __vmaxu2(m, x.w[i][pair] & 0x7fff7fffu);
  return m;
}

__device__ __forceinline__ void round_mxfp8(Values& x, ScaleRule rule) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    std::uint32_t m = largest_pair(x, pair);
    m = __vmaxu2(m, __shfl_xor_sync(ptx::kFullWarp, m, 16));
    const BlockScale low = block_scale<ElementFormat::kE4M3>(m << 16, ScaleFormat::kE8M0, rule, 1.0f);
    const BlockScale high = block_scale<ElementFormat::kE4M3>(m & 0xffff0000u, ScaleFormat::kE8M0, rule, 1.0f);
    const std::uint32_t scales = e8m0_half(low.stored) | e8m0_half(high.stored) << 16;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const std::uint32_t codes =
          encode_pair<ElementFormat::kE4M3>(__fmul_rn(x.value(i, 2 * pair), low.factor), __fmul_rn(x.value(i, 2 * pair + 1), high.factor));
      x.w[i][pair] = multiply_pairs(widen_pair<ElementFormat::kE4M3>(spread_low(codes)), scales);  // a NaN among them has a NaN for its scale
    }
  }
}

template <Shape kShape, bool kRotates, bool kStochastic>
__device__ __forceinline__ void round_nvfp4(Values& x, const QdqCall& p, const Place& at, std::uint32_t signs, std::uint64_t draws) {
  const float group = __ldg(p.group_scales + at.group), reciprocal = group_reciprocal(group);
  GroupRandom random{};
  std::uint64_t place = 0;
  const std::uint64_t row_step = static_cast<std::uint64_t>(p.x.columns) * GroupRandom::kStep;
  if constexpr (kStochastic) {
    random = GroupRandom::of(p, draws, at.group);
    place = static_cast<std::uint64_t>(at.first * p.x.columns + at.column) * GroupRandom::kStep + 1;
  }
  std::uint32_t of_tile = 0;
  if constexpr (kShape == Shape::k16x16) {
    const std::uint32_t m = __vmaxu2(largest_pair(x, 0), largest_pair(x, 1));
    of_tile = max(m << 16, m & 0xffff0000u);
    of_tile = max(of_tile, __shfl_xor_sync(ptx::kFullWarp, of_tile, 1));
    of_tile = max(of_tile, __shfl_xor_sync(ptx::kFullWarp, of_tile, 2));
  }
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    std::uint32_t back[2][kLaneRows / 2];  // of a column: rows in pairs
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float v[kLaneRows];
      take_column(x, 2 * pair + c, kRotates, signs, v);
      std::uint32_t amax = of_tile;
      if constexpr (kShape != Shape::k16x16) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) amax = max(amax, __float_as_uint(v[i]) & kMagnitudeBits);
      }
      const BlockScale scale = block_scale<ElementFormat::kE2M1>(amax, ScaleFormat::kE4M3, p.rule, group);
      const E2m1Values values = E2m1Values::of(scale.divisor, group, reciprocal);
      std::uint64_t counter = place + static_cast<unsigned>(2 * pair + c) * GroupRandom::kStep;
#pragma unroll
      for (int q = 0; q < kLaneRows / 4; ++q) {
        std::uint32_t codes = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          codes |= encode_in_block<kStochastic>(v[4 * q + i], scale, kStochastic ? random.upper_half(counter) : 0u) << (4 * i);
          counter += row_step;
        }
        const uint2 words = values.four(codes);
        back[c][2 * q] = words.x, back[c][2 * q + 1] = words.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) x.w[i][pair] = ptx::permute_bytes(back[0][i / 2], back[1][i / 2], i % 2 == 0 ? 0x5410u : 0x7632u);
  }
}

template <ElementFormat kFormat, Shape kShape, bool kRotates, bool kStochastic>
__global__ void __launch_bounds__(kThreads, 2) qdq_columns(const __grid_constant__ QdqCall p) {
  extern __shared__ int memory[];
  GroupTable table;
  table.build<kRows, kLaneRows>(p.x, memory);
  if (kRotates && blockIdx.x == 0) {
    for (int g = static_cast<int>(threadIdx.x); g <= p.x.groups; g += kThreads) {
      p.y_offsets[g] = (g < p.x.groups ? table.first_block<1>(g) : table.num_blocks<1>()) * kLaneRows;
    }
  }
  const std::uint64_t seed = kRotates || kStochastic ? seed_of(p) : 0, draws = kStochastic ? random_u64(seed, p.draws) : 0;
  const auto signs = kRotates ? static_cast<std::uint16_t>(random_u64(seed, kHadamardStream + p.draws)) : std::uint16_t{0};
  const int column_tiles = (p.x.columns + kColumns - 1) / kColumns;
  const std::int64_t units = static_cast<std::int64_t>(table.num_blocks()) * column_tiles;
  for (std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; unit < units;
       unit += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    Values x;
    const Place at = load(p, table, unit, column_tiles, x);
    if constexpr (kFormat == ElementFormat::kE4M3) {
      round_mxfp8(x, p.rule);
    } else {
      round_nvfp4<kShape, kRotates, kStochastic>(x, p, at, signs, draws);
    }
    if (at.column >= p.x.columns) continue;
    std::uint16_t* to = static_cast<std::uint16_t*>(p.y) + at.y0 * p.x.columns + at.column;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (i < at.written) *reinterpret_cast<uint2*>(to + static_cast<std::int64_t>(i) * p.x.columns) = make_uint2(x.w[i][0], x.w[i][1]);
    }
  }
}

}  // namespace

void launch_qdq_columns(const QdqCall& p, cudaStream_t stream) {
  constexpr ElementFormat kFp4 = ElementFormat::kE2M1;
  if (p.element == ElementFormat::kE4M3) return launch_tiles(qdq_columns<ElementFormat::kE4M3, Shape::k32x1, false, false>, p, stream);
  if (p.block_columns == 16) return launch_tiles(qdq_columns<kFp4, Shape::k16x16, false, false>, p, stream);
  if (p.hadamard) {
    return p.stochastic ? launch_tiles(qdq_columns<kFp4, Shape::k16x1, true, true>, p, stream)
                        : launch_tiles(qdq_columns<kFp4, Shape::k16x1, true, false>, p, stream);
  }
  p.stochastic ? launch_tiles(qdq_columns<kFp4, Shape::k16x1, false, true>, p, stream) : launch_tiles(qdq_columns<kFp4, Shape::k16x1, false, false>, p, stream);
}

}  // namespace waybill::cuda
