// SPDX-License-Identifier: Apache-2.0
// Compile-time sizes and shared memory of an 8-bit grouped matmul CTA.
#pragma once

#include "ops/gemm/cuda/fp8_params.h"
#include "ops/gemm/cuda/grouped_config.cuh"

namespace waybill::cuda {

template <GemmForm kForm_, GemmOutput kOutput_, Fp8Types kTypes_, int kBlockN_, int kStages_, int kCluster_, int kBuffers_>
struct Fp8Config {
  static constexpr GemmForm kForm = kForm_;
  static constexpr GemmOutput kOutput = kOutput_;
  static constexpr Fp8Types kTypes = kTypes_;
  static constexpr int kBlockN = kBlockN_, kStages = kStages_, kCluster = kCluster_, kBuffers = kBuffers_;
  static constexpr int kMathGroups = fp8_limits::math_groups({kBlockN, kStages, kCluster, kBuffers}), kMathWarps = 4 * kMathGroups,
                       kThreads = 128 * (1 + kMathGroups);
  static constexpr int kBlockM = 64 * kMathGroups, kBytesA = kBlockM * fp8_limits::kBlockK, kBytesB = kBlockN * fp8_limits::kBlockK;
  static constexpr int kScaleFloats = fp8_limits::scale_floats(kForm, kBlockM, kBlockN), kFirstScaleB = fp8_limits::first_scale_b(kForm, kBlockM);
  // Columns of a matrix instruction. 192: more than one product would leave the tensor cores waiting for A twice.
  static constexpr int kPartN = kBlockN == 192 ? 192 : 128, kParts = kBlockN / kPartN;
  static_assert(kForm != GemmForm::kNN && kBlockN % kPartN == 0 && (kForm == GemmForm::kTN || kPartN == 128) && (kCluster == 1 || kCluster == 2));
  // Registers a thread after launch; walking groups by blocks takes more.
  static constexpr int kProducerRegisters = 56, kMathRegisters = kMathGroups == 3 ? 152 : 224;
  static constexpr bool kFetches = kForm == GemmForm::kTN && kOutput == GemmOutput::kAddF32 && kStages == 3;  // grouped_accumulate.cuh
  // D's lines are fetched into the L2 before the copy engine adds to them.
  static constexpr bool kPrefetchesSums = kForm == GemmForm::kTN && kOutput == GemmOutput::kAddF32 && !kFetches;
  static constexpr bool kCutsLastRound = kForm == GemmForm::kNT && kOutput == GemmOutput::kBf16 && kBlockN == 256 && kCluster == 2;
  static constexpr int kSumBuffers = kFetches ? kBuffers : 1;
  using Walker = UnitWalker<kForm, kBlockN, kCluster, fp8_limits::kBlockK, kForm == GemmForm::kTN, kBlockM>;
};

template <class C>
struct Fp8Shared {
  std::uint8_t stages[C::kStages][C::kBytesA + C::kBytesB];
  std::uint8_t buffers[C::kMathWarps][C::kBuffers][gemm_limits::kBufferBytes];
  alignas(128) float scales[C::kStages][C::kScaleFloats];
  std::uint64_t full[C::kStages], empty[C::kStages], sums_full[C::kMathWarps][C::kSumBuffers];
  std::uint64_t unit_full[kUnitSlots], unit_empty[kUnitSlots], unit_wanted, ticket_full[2], ticket_empty[2];
  Unit units[kUnitSlots];
  std::uint32_t ticket[2];
  int came_second[C::kMathGroups];
  unsigned sums_phases[C::kMathWarps];
};

}  // namespace waybill::cuda
