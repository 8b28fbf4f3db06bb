// SPDX-License-Identifier: Apache-2.0
#include "ops/activation/activation_kernels.h"

#include <atomic>
#include <string>
#include <string_view>

#include "core/cpu_features.h"
#include "core/implementation.h"

namespace waybill::detail {
namespace {

void forward_portable(const ActivationConfig& config, const ActivationRun& run, float* out) { forward_run(config, run, out); }
void backward_portable(const ActivationConfig& config, const ActivationRun& run, const float* da, float* d_gate, float* d_up, float* product) {
  backward_run(config, run, da, d_gate, d_up, product);
}
const ActivationKernels kPortable = {"portable", forward_portable, backward_portable};

#if defined(__x86_64__)
#define WB_ACT_AVX2 __attribute__((target("avx2,fma")))
#if defined(__clang__)
#define WB_ACT_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#else
#define WB_ACT_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#endif

WB_ACT_AVX2 void forward_avx2(const ActivationConfig& config, const ActivationRun& run, float* out) { forward_run(config, run, out); }
WB_ACT_AVX2 void backward_avx2(const ActivationConfig& config, const ActivationRun& run, const float* da, float* d_gate, float* d_up, float* product) {
  backward_run(config, run, da, d_gate, d_up, product);
}
const ActivationKernels kAvx2 = {"avx2", forward_avx2, backward_avx2};

WB_ACT_AVX512 void forward_avx512(const ActivationConfig& config, const ActivationRun& run, float* out) { forward_run(config, run, out); }
WB_ACT_AVX512 void backward_avx512(const ActivationConfig& config, const ActivationRun& run, const float* da, float* d_gate, float* d_up, float* product) {
  backward_run(config, run, da, d_gate, d_up, product);
}
const ActivationKernels kAvx512 = {"avx512", forward_avx512, backward_avx512};
#endif

const ActivationKernels kReferenceMarker = {"ref", nullptr, nullptr};

const ActivationKernels* find_kernels(std::string_view name) {
  const ActivationKernelList& usable = usable_activation_kernels();
  if (name.empty()) {
    if (selection_is_logged()) log_selection("activation", usable.sets[0]->name, "");
    return usable.sets[0];
  }
  if (name == "ref") return &kReferenceMarker;
  std::string known = "ref";
  for (int i = 0; i < usable.count; ++i) {
    if (name == usable.sets[i]->name) return usable.sets[i];
    known += std::string(", ") + usable.sets[i]->name;
  }
  WB_FAIL(ErrorCode::kUnsupported, "activation implementation \"{}\" was asked for; this machine can run: {}", name, known);
}

std::atomic<const ActivationKernels*>& selection() {
  static std::atomic<const ActivationKernels*> selected{find_kernels(forced_implementation("activation"))};
  return selected;
}

}  // namespace

const ActivationKernelList& usable_activation_kernels() {
  static const ActivationKernelList list = [] {
    ActivationKernelList found{};
#if defined(__x86_64__)
    if (cpu_has_avx512()) found.sets[found.count++] = &kAvx512;
    if (cpu_has_avx2()) found.sets[found.count++] = &kAvx2;
#endif
    found.sets[found.count++] = &kPortable;
    return found;
  }();
  return list;
}

const ActivationKernels* selected_activation_kernels() {
  const ActivationKernels* set = selection().load(std::memory_order_relaxed);
  return set == &kReferenceMarker ? nullptr : set;
}

void force_activation(const char* name) {
  const std::string_view wanted = name == nullptr ? "" : name;
  selection().store(find_kernels(wanted.empty() ? forced_implementation("activation") : std::string(wanted)));
}

}  // namespace waybill::detail
