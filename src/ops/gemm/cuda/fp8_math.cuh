// SPDX-License-Identifier: Apache-2.0
// A k block of an 8-bit grouped matmul: its products on the tensor cores and their sums under scales (fp8_sm90.cuh).
#pragma once

#include "core/cuda/wgmma.cuh"
#include "ops/gemm/cuda/fp8_config.cuh"
#include "ops/gemm/cuda/grouped_sm90.cuh"

namespace waybill::cuda {

// A k block's scales that a thread loads before it waits for the products: those of its two rows; kNT: of B's tiles, kTN: of its first columns.
template <class C>
struct BlockScales {
  static constexpr int kColumnsAhead = C::kForm == GemmForm::kTN ? 4 : 1;
  float low, high, tiles[C::kParts];
  float2 columns[kColumnsAhead];
};

template <class C>
__device__ __forceinline__ float2 column_scales(const float* columns, int part, int step, int lane) {
  return *reinterpret_cast<const float2*>(columns + C::kPartN * part + 8 * step + 2 * (lane % 4));
}

template <class C>
__device__ __forceinline__ BlockScales<C> load_scales(const Fp8Shared<C>& shared, int slot, int row, int lane) {
  BlockScales<C> s;
  const float *a = shared.scales[slot], *b = a + C::kFirstScaleB;
  s.low = a[row], s.high = a[row + 8];
  if constexpr (C::kForm == GemmForm::kNT) {
#pragma unroll
    for (int i = 0; i < C::kParts; ++i) s.tiles[i] = b[i];
  } else {
#pragma unroll
    for (int i = 0; i < s.kColumnsAhead; ++i) s.columns[i] = column_scales<C>(b, 0, i, lane);
  }
  return s;
}

// acc += part under scales. columns: of B, one a column (kTN).
template <class C>
__device__ __forceinline__ void promote(float (&acc)[C::kBlockN / 2], const float (&part)[C::kPartN / 2], int index, const BlockScales<C>& s,
                                        const float* columns, int lane) {
  constexpr int kSteps = C::kPartN / 8;
  if constexpr (C::kForm == GemmForm::kNT) {
    const float low = s.low * s.tiles[index], high = s.high * s.tiles[index];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float* from = part + 4 * step;
      float* to = acc + C::kPartN / 2 * index + 4 * step;
      to[0] = fmaf(from[0], low, to[0]), to[1] = fmaf(from[1], low, to[1]);
      to[2] = fmaf(from[2], high, to[2]), to[3] = fmaf(from[3], high, to[3]);
    }
  } else {
    // A step's sums free registers for the scales of two more steps: loads stay ahead of their use, or each would be waited for.
    float2 column[kSteps];
#pragma unroll
    for (int step = 0; step < s.kColumnsAhead; ++step) column[step] = index == 0 ? s.columns[step] : column_scales<C>(columns, index, step, lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int next = s.kColumnsAhead + 2 * step; next < s.kColumnsAhead + 2 * step + 2; ++next) {
        if (next < kSteps) column[next] = column_scales<C>(columns, index, next, lane);
      }
      asm volatile("" ::: "memory");  // or all are loaded at once: spills
      const float* from = part + 4 * step;
      float* to = acc + C::kPartN / 2 * index + 4 * step;
      to[0] = fmaf(from[0] * column[step].x, s.low, to[0]), to[1] = fmaf(from[1] * column[step].y, s.low, to[1]);
      to[2] = fmaf(from[2] * column[step].x, s.high, to[2]), to[3] = fmaf(from[3] * column[step].y, s.high, to[3]);
    }
  }
}

// Starts the products of part `index` of a stage.
template <class C>
__device__ __forceinline__ void start_part(float (&part)[C::kPartN / 2], int slot, int index, const MathThread& t) {
  const std::uint32_t stage = t.stages_address + static_cast<std::uint32_t>(slot * (C::kBytesA + C::kBytesB));
  const std::uint64_t a = tile_descriptor<true>(stage + static_cast<std::uint32_t>(t.warpgroup * gemm_limits::kHalfBytes));
  const std::uint64_t b = tile_descriptor<true>(stage + C::kBytesA + static_cast<std::uint32_t>(index * C::kPartN * fp8_limits::kBlockK));
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {  // of 32 codes
    ptx::WgmmaFp8<C::kPartN, static_cast<int>(C::kTypes)>::mma(part, a + step * 2, b + step * 2, step != 0 ? 1 : 0);
  }
  ptx::wgmma_commit();
}

}  // namespace waybill::cuda
