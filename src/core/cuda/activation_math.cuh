// SPDX-License-Identifier: Apache-2.0
// Expert activations and their derivatives on the device, one element at a time: what the activation kernels and the epilogues of the grouped
// matmuls share, so that both give the same bits. Formulas and order of operations: src/ops/activation/activation_rows.h.
#pragma once

#include "core/cuda/activation_kind.h"
#include "core/cuda/ptx.cuh"
#include "core/scalar_math.h"

namespace waybill::cuda {

struct ActivationLimits {
  float limit, alpha;  // of the clamped kind
};

// kExact: the CPU's bits (3 ulp). Otherwise relative error 2^-21 + 2^-23 |x|, far below what rounding to bf16 leaves, in a fifth of the instructions.
template <bool kExact>
__device__ __forceinline__ float sigmoid_of(float x) {
  if constexpr (kExact) return scalar::sigmoid(x);
  return ptx::rcp_approx(1.0f + ptx::ex2_approx(x * -1.44269504f));
}

template <ActivationKind kKind, bool kExact>
__device__ __forceinline__ float activate(float gate, float up, const ActivationLimits& c) {
  if constexpr (kKind == ActivationKind::kSwiGLU) {
    return gate * sigmoid_of<kExact>(gate) * up;
  } else if constexpr (kKind == ActivationKind::kClampedSwiGLU) {
    const float g = ptx::min_nan(gate, c.limit), u = ptx::max_nan(ptx::min_nan(up, c.limit), -c.limit);
    return g * sigmoid_of<kExact>(c.alpha * g) * (u + 1.0f);
  } else {
    const float positive = gate > 0.0f ? gate : 0.0f;
    return positive * positive;
  }
}

struct ActivationGradient {
  float product, d_gate, d_up;  // product = da * act(gate, up), which sums to the gradient of the weight
};

template <ActivationKind kKind, bool kExact>
__device__ __forceinline__ ActivationGradient activation_gradient(float gate, float up, float da, float weight, const ActivationLimits& c) {
  ActivationGradient r{};
  if constexpr (kKind == ActivationKind::kSwiGLU) {
    const float d = weight * da, s = sigmoid_of<kExact>(gate), silu = gate * s;
    r.product = da * (silu * up);
    r.d_gate = d * (up * (s + silu * (1.0f - s)));
    r.d_up = d * silu;
  } else if constexpr (kKind == ActivationKind::kClampedSwiGLU) {
    const float g = ptx::min_nan(gate, c.limit), u = ptx::max_nan(ptx::min_nan(up, c.limit), -c.limit) + 1.0f, d = weight * da;
    const float s = sigmoid_of<kExact>(c.alpha * g), gated = g * s;
    const float slope = u * (s + c.alpha * gated * (1.0f - s));
    r.product = da * (gated * u);
    r.d_gate = gate > c.limit ? 0.0f : d * slope;
    r.d_up = fabsf(up) > c.limit ? 0.0f : d * gated;
  } else {
    const float positive = gate > 0.0f ? gate : 0.0f;
    r.product = da * (positive * positive);
    r.d_gate = weight * da * (2.0f * positive);
  }
  return r;
}

// The order of sums for the gradient of a weight: 64 columns at a time, pairs of neighbours, columns 2 q of all 8-column pieces in a tree over
// the pieces, then the four q as (0 + 1) + (2 + 3). Blocks b are added up in order within b % 4, then as (0 + 1) + (2 + 3).
inline constexpr int kWeightBlock = 64;
__device__ __forceinline__ float tree_of_8(const float (&v)[8]) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }
__device__ __forceinline__ float sum_of_4_lanes(float v) {  // lanes 4 i .. 4 i + 3, each gets the sum
  v += __shfl_xor_sync(ptx::kFullWarp, v, 1);
  return v + __shfl_xor_sync(ptx::kFullWarp, v, 2);
}

}  // namespace waybill::cuda
