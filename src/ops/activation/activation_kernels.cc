// SPDX-License-Identifier: Apache-2.0
#include "ops/activation/activation_kernels.h"

#include "core/kernel_sets.h"

namespace waybill::detail {
namespace {

void forward_portable(const ActivationConfig& config, const ActivationRun& run, float* out) { forward_run(config, run, out); }
void backward_portable(const ActivationConfig& config, const ActivationRun& run, const float* da, float* d_gate, float* d_up, float* product) {
  backward_run(config, run, da, d_gate, d_up, product);
}
const ActivationKernels kPortable = {"portable", forward_portable, backward_portable};

#if defined(__x86_64__)
WB_TARGET_AVX2 void forward_avx2(const ActivationConfig& config, const ActivationRun& run, float* out) { forward_run(config, run, out); }
WB_TARGET_AVX2 void backward_avx2(const ActivationConfig& config, const ActivationRun& run, const float* da, float* d_gate, float* d_up, float* product) {
  backward_run(config, run, da, d_gate, d_up, product);
}
const ActivationKernels kAvx2 = {"avx2", forward_avx2, backward_avx2};

WB_TARGET_AVX512 void forward_avx512(const ActivationConfig& config, const ActivationRun& run, float* out) { forward_run(config, run, out); }
WB_TARGET_AVX512 void backward_avx512(const ActivationConfig& config, const ActivationRun& run, const float* da, float* d_gate, float* d_up, float* product) {
  backward_run(config, run, da, d_gate, d_up, product);
}
const ActivationKernels kAvx512 = {"avx512", forward_avx512, backward_avx512};
#endif

KernelSets<ActivationKernels>& kernels() {
#if defined(__x86_64__)
  static KernelSets<ActivationKernels> sets("activation", &kAvx512, &kAvx2, kPortable);
#else
  static KernelSets<ActivationKernels> sets("activation", nullptr, nullptr, kPortable);
#endif
  return sets;
}

}  // namespace

const ActivationKernelList& usable_activation_kernels() { return kernels().usable(); }
const ActivationKernels* selected_activation_kernels() { return kernels().selected(); }
void force_activation(const char* name) { kernels().force(name); }

}  // namespace waybill::detail
