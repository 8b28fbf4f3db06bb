// SPDX-License-Identifier: Apache-2.0
// Eight columns of an activation's result or gradient in registers, rounded to bf16: the bits that activation_forward() and activation_backward() store
// in tensors of bf16 (core/cuda/activation_math.cuh).
#pragma once

#include <cuda_bf16.h>

#include "core/cuda/activation_math.cuh"
#include "ops/quantize/cuda/activated_source.h"
#include "ops/quantize/cuda/wide_piece.cuh"

namespace waybill::cuda {

inline constexpr int kSumColumns = kWeightBlock;  // of a partial sum

__device__ __forceinline__ bool is_gated(const ActivatedSource& s) { return is_gated(static_cast<ActivationKind>(s.kind)); }

__device__ __forceinline__ float value_in(const uint4& w, int i) {
  const std::uint32_t word = i / 2 == 0 ? w.x : (i / 2 == 1 ? w.y : (i / 2 == 2 ? w.z : w.w));
  return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
}
__device__ __forceinline__ std::uint32_t pair_bits(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

template <ActivationKind kKind>
__device__ __forceinline__ Piece<true> activated_piece_of(const ActivatedSource& s, const uint4& gate, const uint4& up, float weight) {
  const ActivationLimits limits{s.limit, s.alpha};
  std::uint32_t w[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float v[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) v[c] = weight * activate<kKind, false>(value_in(gate, 2 * k + c), value_in(up, 2 * k + c), limits);
    w[k] = pair_bits(v[0], v[1]);
  }
  return {make_uint4(w[0], w[1], w[2], w[3])};
}

// weight * act(gate, up).
__device__ __forceinline__ Piece<true> activated_piece(const ActivatedSource& s, const uint4& gate, const uint4& up, float weight) {
  switch (static_cast<ActivationKind>(s.kind)) {
    case ActivationKind::kSwiGLU:
      return activated_piece_of<ActivationKind::kSwiGLU>(s, gate, up, weight);
    case ActivationKind::kClampedSwiGLU:
      return activated_piece_of<ActivationKind::kClampedSwiGLU>(s, gate, up, weight);
    case ActivationKind::kReluSquared:
      break;
  }
  return activated_piece_of<ActivationKind::kReluSquared>(s, gate, up, weight);
}

// sums[q]: of da * act over columns 2 q and 2 q + 1.
struct GradientPiece {
  Piece<true> gate, up;
  float sums[4];
};

template <ActivationKind kKind>
__device__ __forceinline__ GradientPiece gradient_piece_of(const ActivatedSource& s, const uint4& gate, const uint4& up, const uint4& da, float weight) {
  const ActivationLimits limits{s.limit, s.alpha};
  GradientPiece r;
  std::uint32_t g[4], u[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const ActivationGradient low = activation_gradient<kKind, false>(value_in(gate, 2 * k), value_in(up, 2 * k), value_in(da, 2 * k), weight, limits);
    const ActivationGradient high =
        activation_gradient<kKind, false>(value_in(gate, 2 * k + 1), value_in(up, 2 * k + 1), value_in(da, 2 * k + 1), weight, limits);
    g[k] = pair_bits(low.d_gate, high.d_gate), u[k] = is_gated(kKind) ? pair_bits(low.d_up, high.d_up) : 0;
    r.sums[k] = low.product + high.product;
  }
  r.gate.w = make_uint4(g[0], g[1], g[2], g[3]), r.up.w = make_uint4(u[0], u[1], u[2], u[3]);
  return r;
}

__device__ __forceinline__ GradientPiece gradient_piece(const ActivatedSource& s, const uint4& gate, const uint4& up, const uint4& da, float weight) {
  switch (static_cast<ActivationKind>(s.kind)) {
    case ActivationKind::kSwiGLU:
      return gradient_piece_of<ActivationKind::kSwiGLU>(s, gate, up, da, weight);
    case ActivationKind::kClampedSwiGLU:
      return gradient_piece_of<ActivationKind::kClampedSwiGLU>(s, gate, up, da, weight);
    case ActivationKind::kReluSquared:
      break;
  }
  return gradient_piece_of<ActivationKind::kReluSquared>(s, gate, up, da, weight);
}

__device__ __forceinline__ float weight_of(const ActivatedSource& s, std::int64_t row) { return s.weight == nullptr ? 1.0f : __ldg(s.weight + row); }

// 16 bytes of a row, zeros where they are not there.
__device__ __forceinline__ uint4 load_eight(const std::uint16_t* data, std::int64_t at, bool is_there) {
  return is_there ? ptx::ld_stream_v4(data + at) : make_uint4(0, 0, 0, 0);
}

}  // namespace waybill::cuda
