// SPDX-License-Identifier: Apache-2.0
// Epilogues with an expert's activation (formulas: core/cuda/activation_math.cuh), for the forms kNT and kNN, bf16 results.
//   kActivation          h = A B^T (+ bias), rounded to bf16; D = row_weight * act(h). A tile of a gated kind takes kBlockN / 2 gate columns and
//                        the up columns of the same numbers, so a thread holds both. h is stored too where h_data is given.
//   kActivationGradient  da = A B^T, rounded to bf16; D = the gradient of h; sums of da * act(h) over 64 columns go to weight_parts. h comes by the
//                        copy engine: the first blocks while the products are computed, the others as buffers become free.
// The roundings are those of a product, then an activation kernel: the same bits.
#pragma once

#include "core/cuda/activation_math.cuh"
#include "ops/gemm/cuda/grouped_config.cuh"
#include "ops/gemm/cuda/grouped_epilogue.cuh"

namespace waybill::cuda {

// A block of 16 rows x 64 columns in a result buffer, and where it belongs in a bf16 tensor of two planes side by side (or one).
struct BlockTarget {
  const CUtensorMap* map;
  void* data;
  std::int64_t row_stride, plane_offset;  // elements
  int plane, row, column, rows, columns;  // rows, columns: those that exist
};

__device__ __forceinline__ void store_block(std::uint8_t* buffer, const BlockTarget& to, int lane) {
  if (to.rows >= gemm_limits::kBufferRows) {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) ptx::tensor_store_3d(to.map, buffer, to.column, to.row, to.plane);
  } else {
    __syncwarp();
#pragma unroll 1
    for (int row = lane / 8; row < min(to.rows, 16); row += 4) {
      const int column = lane % 8 * 8;
      if (column >= to.columns) break;
      auto* out = static_cast<__nv_bfloat16*>(to.data) + to.plane * to.plane_offset + (static_cast<std::int64_t>(to.row) + row) * to.row_stride + to.column;
      *reinterpret_cast<uint4*>(out + column) = *reinterpret_cast<const uint4*>(buffer + piece_offset(row, lane % 8));
    }
    __syncwarp();
  }
  if (lane == 0) ptx::bulk_commit();
}

__device__ __forceinline__ float low_half(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// Rounds 64 columns to bf16, in place.
template <int kBlockN>
__device__ __forceinline__ void round_columns(float (&acc)[kBlockN / 2], int group) {
#pragma unroll
  for (int at = 32 * group; at < 32 * group + 32; at += 2) {
    const unsigned pair = pack_bf16(acc[at], acc[at + 1]);
    acc[at] = low_half(pair), acc[at + 1] = high_half(pair);
  }
}

// 64 columns of bias, from `bias` on.
template <int kBlockN>
__device__ __forceinline__ void add_bias_columns(float (&acc)[kBlockN / 2], int group, const float* bias, int columns, int q, bool low, bool high) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int column = 8 * j + 2 * q, at = 32 * group + 4 * j;
    const float2 b = column < columns ? make_float2(__ldg(bias + column), __ldg(bias + column + 1)) : make_float2(0, 0);
    if (low) acc[at] += b.x, acc[at + 1] += b.y;
    if (high) acc[at + 2] += b.x, acc[at + 3] += b.y;
  }
}

__device__ __forceinline__ bool is_padding_row(const GroupedParams& p, const Unit& u, int row) {
  return p.a_list != nullptr && (row >= u.m_valid || static_cast<unsigned>(__ldg(p.a_list + u.m0 + row)) >= static_cast<unsigned>(p.a_rows));
}
__device__ __forceinline__ float row_weight(const GroupedParams& p, const Unit& u, int row) {
  return p.row_weight != nullptr && row < u.m_valid ? __ldg(p.row_weight + u.m0 + row) : 1.0f;
}

template <class C, ActivationKind kKind>
__device__ __forceinline__ void store_activation_of(float (&acc)[C::kBlockN / 2], std::uint8_t* buffers, const GroupedParams& p, const Unit& u, int warp_row,
                                                    int lane) {
  constexpr bool kGated = is_gated(kKind);
  constexpr int kGroups = C::kBlockN / (kGated ? 128 : 64), kUp = kGated ? kGroups : 0;  // the up columns of group g are group g + kUp
  const int width = kGated ? p.n / 2 : p.n, first = kGated ? u.n0 / 2 : u.n0, row = warp_row + lane / 4;
  const ActivationLimits limits{p.act_limit, p.act_alpha};
  int turn = 0;
  const auto put = [&](int group, const CUtensorMap& map, void* data, std::int64_t stride, int plane, int column) {
    std::uint8_t* buffer = buffers + turn % C::kBuffers * gemm_limits::kBufferBytes;
    ++turn;
    if (lane == 0) ptx::bulk_wait_read<C::kBuffers - 1>();
    __syncwarp();
    fill_bf16<C::kBlockN>(acc, group, buffer, lane);
    store_block(buffer, {&map, data, stride, width, plane, u.m0 + warp_row, column, u.m_valid - warp_row, width - column}, lane);
  };
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int column = first + 64 * g;
    if (column >= width) break;
    if (p.bias != nullptr) {
      const float* bias = p.bias + static_cast<std::int64_t>(u.group) * p.n + column;
      const bool low = !is_padding_row(p, u, row), high = !is_padding_row(p, u, row + 8);
      add_bias_columns<C::kBlockN>(acc, g, bias, width - column, lane % 4, low, high);
      if constexpr (kGated) add_bias_columns<C::kBlockN>(acc, g + kUp, bias + width, width - column, lane % 4, low, high);
    }
    round_columns<C::kBlockN>(acc, g);
    if constexpr (kGated) round_columns<C::kBlockN>(acc, g + kUp);
    if (p.h_data != nullptr) {
      put(g, p.h, p.h_data, p.n, 0, column);
      if constexpr (kGated) put(g + kUp, p.h, p.h_data, p.n, 1, column);
    }
    const float low_weight = row_weight(p, u, row), high_weight = row_weight(p, u, row + 8);  // each time: registers are few
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      acc[32 * g + i] = (i % 4 < 2 ? low_weight : high_weight) * activate<kKind, false>(acc[32 * g + i], acc[32 * (g + kUp) + i], limits);
    }
    put(g, p.d, p.d_data, width, 0, column);
  }
}

template <class C>
__device__ __forceinline__ void store_activation(float (&acc)[C::kBlockN / 2], std::uint8_t* buffers, const GroupedParams& p, const Unit& u, int warp_row,
                                                 int lane) {
  if (p.act_kind == ActivationKind::kSwiGLU) {
    store_activation_of<C, ActivationKind::kSwiGLU>(acc, buffers, p, u, warp_row, lane);
  } else if (p.act_kind == ActivationKind::kClampedSwiGLU) {
    store_activation_of<C, ActivationKind::kClampedSwiGLU>(acc, buffers, p, u, warp_row, lane);
  } else {
    store_activation_of<C, ActivationKind::kReluSquared>(acc, buffers, p, u, warp_row, lane);
  }
}

// --- gradient: a warp's buffers in pairs, gate and up of the same 64 columns ---
template <class C>
__device__ __forceinline__ void load_h_block(const GroupedParams& p, GroupedShared<C>& shared, const Unit& u, int warp, int group) {
  const int column = u.n0 + 64 * group, row = u.m0 + 16 * warp, pair = group % C::kPairs;
  const bool gated = is_gated(p.act_kind);
  std::uint64_t* bar = &shared.h_full[warp][pair];
  ptx::mbarrier_arrive_expect(bar, gated ? 2 * gemm_limits::kBufferBytes : gemm_limits::kBufferBytes);
  ptx::tensor_load_3d(shared.buffers[warp][2 * pair], &p.h, column, row, 0, bar);
  if (gated) ptx::tensor_load_3d(shared.buffers[warp][2 * pair + 1], &p.h, column, row, 1, bar);
}

// Lane 0 of a warp with rows, early in a unit.
template <class C>
__device__ __forceinline__ void start_h(const GroupedParams& p, GroupedShared<C>& shared, const Unit& u, int warp) {
  ptx::bulk_wait_read<0>();  // the last unit's results have left the buffers
#pragma unroll
  for (int group = 0; group < C::kPairs; ++group) {
    if (u.n0 + 64 * group < p.n) load_h_block<C>(p, shared, u, warp, group);
  }
}

template <class C, ActivationKind kKind>
__device__ __forceinline__ void store_gradient_of(float (&acc)[C::kBlockN / 2], GroupedShared<C>& shared, const GroupedParams& p, const Unit& u, int warp) {
  constexpr bool kGated = is_gated(kKind);
  constexpr int kGroups = C::kBlockN / 64;
  const ActivationLimits limits{p.act_limit, p.act_alpha};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int lane = ptx::thread_index() % 32, warp_row = 16 * warp, row = warp_row + lane / 4, matrix = lane / 8;
    const int column = u.n0 + 64 * g, pair = g % C::kPairs;
    if (column >= p.n) break;
    volatile unsigned& phases = shared.h_phases[warp];  // in shared memory: held, it would cost spills
    const unsigned phase = phases;
    ptx::mbarrier_wait(&shared.h_full[warp][pair], phase >> pair & 1u);
    __syncwarp();
    if (lane == 0) phases = phase ^ 1u << pair;
    std::uint8_t *gate = shared.buffers[warp][2 * pair], *up = shared.buffers[warp][2 * pair + 1];
    const float low_weight = row_weight(p, u, row), high_weight = row_weight(p, u, row + 8);
    float low[8], high[8];  // sums of two neighbours' products
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const std::uint32_t place = piece_offset((matrix & 1) * 8 + lane % 8, j + (matrix >> 1));
      unsigned h[4], v[4] = {};
      ptx::load_matrix_x4(ptx::smem_address(gate) + place, h[0], h[1], h[2], h[3]);
      if constexpr (kGated) ptx::load_matrix_x4(ptx::smem_address(up) + place, v[0], v[1], v[2], v[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // i: rows low or high of columns 8 j, then of 8 (j + 1)
        const int at = 32 * g + 4 * j + 2 * i;
        const unsigned da = pack_bf16(acc[at], acc[at + 1]);
        const float weight = i % 2 == 0 ? low_weight : high_weight;
        const ActivationGradient a = activation_gradient<kKind, false>(low_half(h[i]), low_half(v[i]), low_half(da), weight, limits);
        const ActivationGradient b = activation_gradient<kKind, false>(high_half(h[i]), high_half(v[i]), high_half(da), weight, limits);
        h[i] = pack_bf16(a.d_gate, b.d_gate), v[i] = pack_bf16(a.d_up, b.d_up);
        const float sum = column + 8 * (j + i / 2) < p.n ? a.product + b.product : 0.0f;
        (i % 2 == 0 ? low : high)[j + i / 2] = sum;
      }
      ptx::store_matrix_x4(ptx::smem_address(gate) + place, h[0], h[1], h[2], h[3]);
      if constexpr (kGated) ptx::store_matrix_x4(ptx::smem_address(up) + place, v[0], v[1], v[2], v[3]);
    }
    const int stride = kGated ? 2 * p.n : p.n;
    BlockTarget to{&p.d, p.d_data, stride, p.n, 0, u.m0 + warp_row, column, u.m_valid - warp_row, p.n - column};
    store_block(gate, to, lane);
    if constexpr (kGated) to.plane = 1, store_block(up, to, lane);
    if (p.weight_parts != nullptr) {
      const float low_sum = sum_of_4_lanes(tree_of_8(low)), high_sum = sum_of_4_lanes(tree_of_8(high));
      const int blocks = (p.n + kWeightBlock - 1) / kWeightBlock;
      float* part = p.weight_parts + (static_cast<std::int64_t>(u.m0) + row) * blocks + column / kWeightBlock;
      if (lane % 4 == 0 && row < u.m_valid) *part = low_sum;
      if (lane % 4 == 0 && row + 8 < u.m_valid) part[std::int64_t{8} * blocks] = high_sum;
    }
    if (g + C::kPairs < kGroups && u.n0 + 64 * (g + C::kPairs) < p.n) {
      __syncwarp();
      if (lane == 0) ptx::bulk_wait_read<0>(), load_h_block<C>(p, shared, u, warp, g + C::kPairs);
    }
  }
}

template <class C>
__device__ __forceinline__ void store_gradient(float (&acc)[C::kBlockN / 2], GroupedShared<C>& shared, const GroupedParams& p, const Unit& u, int warp) {
  if (p.act_kind == ActivationKind::kSwiGLU) {
    store_gradient_of<C, ActivationKind::kSwiGLU>(acc, shared, p, u, warp);
  } else if (p.act_kind == ActivationKind::kClampedSwiGLU) {
    store_gradient_of<C, ActivationKind::kClampedSwiGLU>(acc, shared, p, u, warp);
  } else {
    store_gradient_of<C, ActivationKind::kReluSquared>(acc, shared, p, u, warp);
  }
}

}  // namespace waybill::cuda
