// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/kernel.h"

#include "core/kernel_sets.h"

namespace waybill::detail {
namespace {

KernelSets<KernelSet, KernelList>& kernels() {
#if defined(__x86_64__)
  static KernelSets<KernelSet, KernelList> sets("gemm", &kAvx512Kernels, &kAvx2Kernels, kPortableKernels);
#else
  static KernelSets<KernelSet, KernelList> sets("gemm", nullptr, nullptr, kPortableKernels);
#endif
  return sets;
}

}  // namespace

const KernelList& usable_kernels() { return kernels().usable(); }
const KernelSet* selected_kernels() { return kernels().selected(); }
void force_gemm(const char* name) { kernels().force(name); }

}  // namespace waybill::detail
