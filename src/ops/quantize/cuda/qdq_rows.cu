// SPDX-License-Identifier: Apache-2.0
// qdq.h, blocks along a row: 1 x 32 (MXFP8) and 1 x 16 (NVFP4). Grid: persistent, 256 threads; a warp takes 256 columns of a row at a time, several of
// them under way together, a lane 8 adjacent columns, and the lanes of a block find its largest magnitude by shuffles. A CTA's places are adjacent, so that a
// warp seldom looks for its group anew. Bytes: x once, y once.
#include <algorithm>

#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/launch_grid.h"
#include "ops/quantize/cuda/qdq_block.cuh"
#include "ops/quantize/cuda/wide_codes.cuh"
#include "ops/quantize/cuda/wide_piece.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kWarpColumns = 256;

template <bool kStochastic>
constexpr int kUnderWay = kStochastic ? 2 : 4;  // pieces of a lane

// What a warp knows of the group it is in.
struct RowGroup {
  int begin = 0, end = 0;
  float scale = 1.0f, reciprocal = 0.0f;
  GroupRandom random{};
};

__device__ __forceinline__ uint4 round_mxfp8(const Piece<true>& piece, std::uint32_t amax, ScaleRule rule) {
  const std::uint32_t byte = e8m0_of<ElementFormat::kE4M3>(amax, rule), scale = both(e8m0_half(byte));
  const float factor = block_scale<ElementFormat::kE4M3>(amax, ScaleFormat::kE8M0, rule, 1.0f).factor;
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t codes = encode_pair<ElementFormat::kE4M3>(__fmul_rn(piece.value(2 * i), factor), __fmul_rn(piece.value(2 * i + 1), factor));
    words[i] = multiply_pairs(widen_pair<ElementFormat::kE4M3>(spread_low(codes)), scale);  // a NaN among them has a NaN for its scale
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <bool kStochastic>
__device__ __forceinline__ uint4 round_nvfp4(const Piece<true>& piece, std::uint32_t amax, ScaleRule rule, const RowGroup& group, std::uint64_t place) {
  const BlockScale scale = block_scale<ElementFormat::kE2M1>(amax, ScaleFormat::kE4M3, rule, group.scale);
  std::uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t random = kStochastic ? group.random.upper_half(place + static_cast<unsigned>(i) * GroupRandom::kStep) : 0u;
    codes |= encode_in_block<kStochastic>(piece.value(i), scale, random) << (4 * i);
  }
  const E2m1Values values = E2m1Values::of(scale.divisor, group.scale, group.reciprocal);
  const uint2 low = values.four(codes), high = values.four(codes >> 16);
  return make_uint4(low.x, low.y, high.x, high.y);
}

template <ElementFormat kFormat, bool kStochastic>
__global__ void __launch_bounds__(kThreads) qdq_rows(const __grid_constant__ QdqCall p, int segments, int iterations) {
  extern __shared__ int memory[];
  constexpr bool kHasGroups = kFormat == ElementFormat::kE2M1;
  constexpr int kPieces = kUnderWay<kStochastic>;
  GroupTable table;
  table.build<1>(p.x, memory);
  const std::uint64_t draws = kStochastic ? random_u64(seed_of(p), p.draws) : 0;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, num_units = table.rows() * segments;
  int unit = table.first_row(0) * segments + (static_cast<int>(blockIdx.x) * iterations * kWarps + warp) * kPieces;
  RowGroup group;
  for (int turn = 0; turn < iterations && unit < num_units; ++turn, unit += kWarps * kPieces) {
    Piece<true> pieces[kPieces];
    int row[kPieces], column[kPieces], source[kPieces];
    row[0] = unit / segments;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i > 0) row[i] = row[i - 1];
      int segment = unit + i - row[i] * segments;
      if (segment >= segments) ++row[i], segment -= segments;
      column[i] = unit + i < num_units ? segment * kWarpColumns + 8 * lane : p.x.columns;
      source[i] = row[i];
    }
    if (p.x.list != nullptr) {  // apart from the loads of values, which wait for each other else
#pragma unroll
      for (int i = 0; i < kPieces; ++i) source[i] = column[i] < p.x.columns ? __ldg(p.x.list + row[i]) : -1;
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i].load(p.x.data, source[i] * p.x.stride + column[i], source[i] >= 0 && column[i] < p.x.columns);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (kHasGroups && unit + i < num_units && (row[i] < group.begin || row[i] >= group.end)) {
        const int g = table.group_of_row(row[i]);
        group.begin = table.first_row(g), group.end = table.end_row(g), group.scale = __ldg(p.group_scales + g);
        group.reciprocal = group_reciprocal(group.scale);
        if constexpr (kStochastic) group.random = GroupRandom::of(p, draws, g);
      }
      std::uint32_t amax = pieces[i].largest();
      amax = max(amax, __shfl_xor_sync(ptx::kFullWarp, amax, 1));
      if constexpr (kFormat == ElementFormat::kE4M3) amax = max(amax, __shfl_xor_sync(ptx::kFullWarp, amax, 2));
      if (column[i] >= p.x.columns) continue;
      uint4 words;
      if constexpr (kFormat == ElementFormat::kE4M3) {
        words = round_mxfp8(pieces[i], amax, p.rule);
      } else {
        const auto counter = static_cast<std::uint64_t>(static_cast<std::int64_t>(row[i] - group.begin) * p.x.columns + column[i]);
        words = round_nvfp4<kStochastic>(pieces[i], amax, p.rule, group, counter * GroupRandom::kStep + 1);
      }
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.y) + static_cast<std::int64_t>(row[i]) * p.x.columns + column[i]) = words;
    }
  }
}

template <ElementFormat kFormat, bool kStochastic>
void launch(const QdqCall& p, cudaStream_t stream) {
  const int segments = (p.x.columns + kWarpColumns - 1) / kWarpColumns;
  const std::int64_t per_cta = kWarps * kUnderWay<kStochastic>, turns = std::max<std::int64_t>((p.x.rows * segments + per_cta - 1) / per_cta, 1);
  const std::int64_t ctas = std::min<std::int64_t>(turns, num_sms() * 8);
  const std::size_t bytes = GroupTable::bytes(p.x.groups, 1);
  allow_shared(qdq_rows<kFormat, kStochastic>, bytes);
  qdq_rows<kFormat, kStochastic><<<static_cast<unsigned>(ctas), kThreads, bytes, stream>>>(p, segments, static_cast<int>((turns + ctas - 1) / ctas));
}

}  // namespace

void launch_qdq_rows(const QdqCall& p, cudaStream_t stream) {
  if (p.element == ElementFormat::kE4M3) return launch<ElementFormat::kE4M3, false>(p, stream);
  p.stochastic ? launch<ElementFormat::kE2M1, true>(p, stream) : launch<ElementFormat::kE2M1, false>(p, stream);
}

}  // namespace waybill::cuda
