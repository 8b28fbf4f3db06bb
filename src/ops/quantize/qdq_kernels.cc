// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize/qdq_kernels.h"

#include <atomic>
#include <string>
#include <string_view>

#include "core/cpu_features.h"
#include "core/implementation.h"

namespace waybill::detail {
namespace {

// The same functions for every instruction set; `target` is its attribute.
#define WB_QDQ_SET(Set, set_name, target)                                                                                            \
  struct Set {                                                                                                                       \
    template <ElementFormat kElement, ScaleFormat kScale, bool kStochastic>                                                          \
    target static void block(const QuantConfig& config, const QdqBlock& b) {                                                         \
      qdq_block<kElement, kScale, kStochastic>(config, b);                                                                           \
    }                                                                                                                                \
    target static std::int32_t largest_number(const float* x, std::int64_t count) { return largest_number_bits(x, count); }          \
    target static void hadamard(const float* const* x, std::int64_t num_rows, std::int64_t columns, std::uint16_t signs, float* y) { \
      hadamard_block(x, num_rows, columns, signs, y);                                                                                \
    }                                                                                                                                \
    target static void bf16(const float* x, std::int64_t count, std::uint16_t* y) { bf16_run(x, count, y); }                         \
    static constexpr const char* kName = set_name;                                                                                   \
  }

template <class Set, ElementFormat kElement, ScaleFormat kScale>
constexpr void fill(QdqKernels& kernels) {
  QdqBlockFn(&entry)[2] = kernels.block[static_cast<int>(kElement)][static_cast<int>(kScale)];
  entry[0] = Set::template block<kElement, kScale, false>;
  entry[1] = Set::template block<kElement, kScale, true>;
}

template <class Set, ElementFormat kElement>
constexpr void fill(QdqKernels& kernels) {
  fill<Set, kElement, ScaleFormat::kE8M0>(kernels);
  fill<Set, kElement, ScaleFormat::kPowerOfTwo>(kernels);
  fill<Set, kElement, ScaleFormat::kF32>(kernels);
  fill<Set, kElement, ScaleFormat::kE4M3>(kernels);
}

template <class Set>
constexpr QdqKernels make_kernels() {
  QdqKernels kernels{Set::kName, {}, Set::largest_number, Set::hadamard, Set::bf16};
  fill<Set, ElementFormat::kE4M3>(kernels);
  fill<Set, ElementFormat::kE5M2>(kernels);
  fill<Set, ElementFormat::kE2M1>(kernels);
  return kernels;
}

WB_QDQ_SET(Portable, "portable", );
const QdqKernels kPortable = make_kernels<Portable>();

#if defined(__x86_64__)
#if defined(__clang__)
#define WB_QDQ_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#else
#define WB_QDQ_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#endif
WB_QDQ_SET(Avx2, "avx2", __attribute__((target("avx2,fma"))));
WB_QDQ_SET(Avx512, "avx512", WB_QDQ_AVX512);
const QdqKernels kAvx2 = make_kernels<Avx2>();
const QdqKernels kAvx512 = make_kernels<Avx512>();
#endif

const QdqKernels kReferenceMarker = {"ref", {}, nullptr, nullptr, nullptr};

const QdqKernels* find_kernels(std::string_view name) {
  const QdqKernelList& usable = usable_qdq_kernels();
  if (name.empty()) {
    if (selection_is_logged()) log_selection("quantize", usable.sets[0]->name, "");
    return usable.sets[0];
  }
  if (name == "ref") return &kReferenceMarker;
  std::string known = "ref";
  for (int i = 0; i < usable.count; ++i) {
    if (name == usable.sets[i]->name) return usable.sets[i];
    known += std::string(", ") + usable.sets[i]->name;
  }
  WB_FAIL(ErrorCode::kUnsupported, "quantize implementation \"{}\" was asked for; this machine can run: {}", name, known);
}

std::atomic<const QdqKernels*>& selection() {
  static std::atomic<const QdqKernels*> selected{find_kernels(forced_implementation("quantize"))};
  return selected;
}

}  // namespace

const QdqKernelList& usable_qdq_kernels() {
  static const QdqKernelList list = [] {
    QdqKernelList found{};
#if defined(__x86_64__)
    if (cpu_has_avx512()) found.sets[found.count++] = &kAvx512;
    if (cpu_has_avx2()) found.sets[found.count++] = &kAvx2;
#endif
    found.sets[found.count++] = &kPortable;
    return found;
  }();
  return list;
}

const QdqKernels* selected_qdq_kernels() {
  const QdqKernels* set = selection().load(std::memory_order_relaxed);
  return set == &kReferenceMarker ? nullptr : set;
}

void force_quantize(const char* name) {
  const std::string_view wanted = name == nullptr ? "" : name;
  selection().store(find_kernels(wanted.empty() ? forced_implementation("quantize") : std::string(wanted)));
}

}  // namespace waybill::detail
