// SPDX-License-Identifier: Apache-2.0
// The expert activations that kernels know, numbered as waybill::Activation (an op's header, which core does not include).
#pragma once

namespace waybill::cuda {

enum class ActivationKind : int { kSwiGLU = 0, kClampedSwiGLU = 1, kReluSquared = 2 };
// Gated kinds read two planes of the pre-activation, gate and up; the others one.
constexpr bool is_gated(ActivationKind kind) { return kind != ActivationKind::kReluSquared; }

}  // namespace waybill::cuda
