// SPDX-License-Identifier: Apache-2.0
// The instruction sets of the activations. All give the same bits; they differ in speed.
#pragma once

#include "core/kernel_sets.h"
#include "ops/activation/activation_rows.h"

namespace waybill::detail {

struct ActivationKernels {
  const char* name;
  void (*forward)(const ActivationConfig&, const ActivationRun&, float* out);
  void (*backward)(const ActivationConfig&, const ActivationRun&, const float* da, float* d_gate, float* d_up, float* product);
};

using ActivationKernelList = UsableSets<ActivationKernels>;
// Those this machine can run, best first.
WB_API const ActivationKernelList& usable_activation_kernels();

// The best one, or what WB_FORCE=activation:<name> or force_activation() names; null = the reference loops ("ref").
const ActivationKernels* selected_activation_kernels();
WB_API void force_activation(const char* name);  // tests; "" returns to the default

}  // namespace waybill::detail
