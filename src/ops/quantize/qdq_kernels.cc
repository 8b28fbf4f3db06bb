// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize/qdq_kernels.h"

#include "core/kernel_sets.h"

namespace waybill::detail {
namespace {

// NOLINTBEGIN(bugprone-macro-parentheses): neither an attribute nor a name can stand in parentheses.
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
// NOLINTEND(bugprone-macro-parentheses)

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
WB_QDQ_SET(Avx2, "avx2", WB_TARGET_AVX2);
WB_QDQ_SET(Avx512, "avx512", WB_TARGET_AVX512);
const QdqKernels kAvx2 = make_kernels<Avx2>();
const QdqKernels kAvx512 = make_kernels<Avx512>();
#endif

KernelSets<QdqKernels>& kernels() {
#if defined(__x86_64__)
  static KernelSets<QdqKernels> sets("quantize", &kAvx512, &kAvx2, kPortable);
#else
  static KernelSets<QdqKernels> sets("quantize", nullptr, nullptr, kPortable);
#endif
  return sets;
}

}  // namespace

const QdqKernelList& usable_qdq_kernels() { return kernels().usable(); }
const QdqKernels* selected_qdq_kernels() { return kernels().selected(); }
void force_quantize(const char* name) { kernels().force(name); }

}  // namespace waybill::detail
