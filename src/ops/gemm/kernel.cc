// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/kernel.h"

#include <atomic>
#include <string>
#include <string_view>

#include "core/cpu_features.h"
#include "core/implementation.h"

namespace waybill::detail {
namespace {

const KernelSet kReferenceMarker = {"ref", 0, 0, {}, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};

const KernelSet* find_kernels(std::string_view name) {
  if (name.empty()) {
    if (selection_is_logged()) log_selection("gemm", usable_kernels().sets[0]->name, "");
    return usable_kernels().sets[0];
  }
  if (name == "ref") return &kReferenceMarker;
  std::string known = "ref";
  for (int i = 0; i < usable_kernels().count; ++i) {
    const KernelSet* set = usable_kernels().sets[i];
    if (name == set->name) return set;
    known += std::string(", ") + set->name;
  }
  WB_FAIL(ErrorCode::kUnsupported, "gemm implementation \"{}\" was asked for; this machine can run: {}", name, known);
}

std::atomic<const KernelSet*>& selection() {
  static std::atomic<const KernelSet*> selected{find_kernels(forced_implementation("gemm"))};
  return selected;
}

}  // namespace

const KernelList& usable_kernels() {
  static const KernelList list = [] {
    KernelList found{};
#if defined(__x86_64__)
    if (cpu_has_avx512()) found.sets[found.count++] = &kAvx512Kernels;
    if (cpu_has_avx2()) found.sets[found.count++] = &kAvx2Kernels;
#endif
    found.sets[found.count++] = &kPortableKernels;
    return found;
  }();
  return list;
}

const KernelSet* selected_kernels() {
  const KernelSet* set = selection().load(std::memory_order_relaxed);
  return set == &kReferenceMarker ? nullptr : set;
}

void force_gemm(const char* name) {
  const std::string_view wanted = name == nullptr ? "" : name;
  selection().store(find_kernels(wanted.empty() ? forced_implementation("gemm") : std::string(wanted)));
}

}  // namespace waybill::detail
