// SPDX-License-Identifier: Apache-2.0
// Turns coded rows and weights into bf16 for the product that runs beside it (widened_sm90.cuh): warps draw pieces of a few rows, in the order in which the
// product needs them, and count what is ready. A group's turns: the rows' blocks of its first band, all blocks of its weights, its other rows' blocks.
#pragma once

#include "core/cuda/wide_codes.cuh"
#include "ops/gemm/cuda/widened_params.h"
#include "waybill/quantize_format.h"

namespace waybill::cuda {

// Waits until the count is there; what was written before it was counted is then seen, also by the copy engine.
__device__ __forceinline__ void await_count(const std::uint32_t* at, std::uint32_t count) {
  while (ptx::ld_acquire_gpu(at) < count) __nanosleep(64);
}
__device__ __forceinline__ void add_count(std::uint32_t* at, std::uint32_t by) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(by) : "memory");
}

// E4M3 under a byte scale, a code at a time.
__device__ __forceinline__ uint4 widen_eight_singly(uint2 codes, std::uint32_t byte) {
  const float scale = __uint_as_float(byte == 255 ? 0x7fc00000u : (byte == 0 ? 0x400000u : byte << 23));
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t bits = bf16_bits(__fmul_rn(decode_e4m3((i < 4 ? codes.x : codes.y) >> (8 * (i % 4)) & 0xffu), scale));
    words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ uint4 widen_eight(uint2 codes, std::uint32_t byte) {
  if (special_bits<3>(codes.x) != 0 || special_bits<3>(codes.y) != 0) return widen_eight_singly(codes, byte);
  const std::uint32_t scale = both(e8m0_half(byte));
  return make_uint4(multiply_pairs(widen_pair<3>(spread_low(codes.x)), scale), multiply_pairs(widen_pair<3>(spread_high(codes.x)), scale),
                    multiply_pairs(widen_pair<3>(spread_low(codes.y)), scale), multiply_pairs(widen_pair<3>(spread_high(codes.y)), scale));
}

// One row; a lane has kLane adjacent codes of kSteps places under way. E2M1: the 16 of a block, whose values are computed once.
template <ElementFormat kFormat, int kSteps>
__device__ __forceinline__ void widen_row(const std::uint8_t* codes, const std::uint8_t* scales, std::uint16_t* to, int columns, int lane, float group,
                                          float reciprocal) {
  constexpr bool kIsE2m1 = kFormat == ElementFormat::kE2M1;
  constexpr int kLane = kIsE2m1 ? 16 : 8, kStep = 32 * kLane;
#pragma unroll 1
  for (int base = kLane * lane; base < columns; base += kSteps * kStep) {
    uint2 got[kSteps];
    std::uint32_t bytes[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int column = base + kStep * i;
      if (column >= columns) break;
      got[i] = ptx::ld_stream_v2(codes + (kIsE2m1 ? column / 2 : column));
      bytes[i] = __ldg(scales + column / (kIsE2m1 ? 16 : 32));
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int column = base + kStep * i;
      if (column >= columns) break;
      if constexpr (kIsE2m1) {
        const E2m1Values values = E2m1Values::of(decode_e4m3(bytes[i]), group, reciprocal);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const std::uint32_t eight = h == 0 ? got[i].x : got[i].y;
          const uint2 low = values.four(eight), high = values.four(eight >> 16);
          *reinterpret_cast<uint4*>(to + column + 8 * h) = make_uint4(low.x, low.y, high.x, high.y);
        }
      } else {
        *reinterpret_cast<uint4*>(to + column) = widen_eight(got[i], bytes[i]);
      }
    }
  }
}

// Pieces that all warps make before the product begins: none of them waits for a slot.
__device__ __forceinline__ unsigned opening_pieces(const WidenedParams& p) {
  return static_cast<unsigned>(min(min(p.opening_turns, p.ring_blocks), __ldg(p.first_turn + min(p.ring_groups, p.product.groups)))) << p.piece_shift;
}

// All lanes of a warp. is_opening: the warp's share of the opening, else what is drawn behind it until none is left.
template <ElementFormat kFormat, int kSteps>
__device__ void widen_pieces(const WidenedParams& p, bool is_opening) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned opening = opening_pieces(p), warps = gridDim.x * (blockDim.x / 32);
  unsigned piece = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  int g = 0;
#pragma unroll 1
  for (;; piece += warps) {
    if (!is_opening) {
      if (lane == 0) piece = opening + atomicAdd(p.next_piece, 1u);
      piece = __shfl_sync(ptx::kFullWarp, piece, 0);
    }
    const int turn = static_cast<int>(piece >> p.piece_shift);
    if ((is_opening && piece >= opening) || turn >= __ldg(p.first_turn + p.product.groups)) return;
    for (int passed = 32; passed == 32;) {  // the last group that starts at or before the turn
      const int at = g + 1 + lane, value = at <= p.product.groups ? __ldg(p.first_turn + at) : 0x7fffffff;
      passed = __popc(__ballot_sync(ptx::kFullWarp, value <= turn));
      g += passed;
    }
    const std::uint8_t *codes, *scales;
    std::uint16_t* to;
    std::uint32_t* ready;
    std::int64_t code_stride, scale_stride;
    int count;
    float group = 1.0f, reciprocal = 0.0f;
    {
      const int first_block = __ldg(p.first_block + g), blocks = __ldg(p.first_block + g + 1) - first_block;
      const int local = turn - __ldg(p.first_turn + g), band = min(blocks, kWidenedBand);
      const bool is_weight = local >= band && local < band + p.weight_blocks;
      const int block = is_weight ? local - band : (local < band ? local : local - p.weight_blocks);
      const int part_row = static_cast<int>(piece & ((1u << p.piece_shift) - 1)) * p.piece_rows, row0 = block * kWidenedRows + part_row;  // in the group
      const CodedSource& x = is_weight ? p.weights : p.rows;
      const std::uint32_t q_tiles = static_cast<std::uint32_t>((p.product.n + kWidenedTile.block_n - 1) / kWidenedTile.block_n);
      std::int64_t from, slot_row;
      if (is_weight) {
        if (lane == 0) {
          // The last group with rows in the same slot: it has waited for those before it.
          for (int old = g - p.ring_groups; old >= 0; old -= p.ring_groups) {
            const int read = __ldg(p.first_block + old + 1) - __ldg(p.first_block + old);
            if (read == 0) continue;
            await_count(p.weights_read + old, q_tiles * static_cast<std::uint32_t>(read));
            break;
          }
        }
        from = static_cast<std::int64_t>(g) * p.product.n + row0, slot_row = static_cast<std::int64_t>(g % p.ring_groups) * p.product.n + row0;
        count = p.product.n - row0, ready = p.weights_ready + static_cast<std::int64_t>(g) * p.weight_blocks + block;
      } else {
        const int b = first_block + block, begin = __ldg(p.product.offsets + g);
        if (b >= p.ring_blocks && lane == 0) await_count(p.rows_read + b - p.ring_blocks, q_tiles);
        from = begin + row0, slot_row = static_cast<std::int64_t>(b % p.ring_blocks) * kWidenedRows + part_row;
        count = __ldg(p.product.offsets + g + 1) - begin - row0, ready = p.rows_ready + b;
      }
      __syncwarp();
      count = min(count, p.piece_rows);
      code_stride = x.code_stride, scale_stride = x.scale_stride;
      codes = x.codes + from * code_stride, scales = x.scales + from * scale_stride, to = x.wide + slot_row * p.product.k;
      if constexpr (kFormat == ElementFormat::kE2M1) group = __ldg(x.group_scales + g), reciprocal = group_reciprocal(group);
    }
#pragma unroll 1
    for (; count > 0; --count) {
      widen_row<kFormat, kSteps>(codes, scales, to, p.product.k, lane, group, reciprocal);
      codes += code_stride, scales += scale_stride, to += p.product.k;
    }
    ptx::fence_async_proxy_all();
    __syncwarp();
    if (lane == 0) __threadfence(), add_count(ready, 1);
  }
}

}  // namespace waybill::cuda
