// SPDX-License-Identifier: Apache-2.0
// What the roles of a grouped matmul CTA share: compile-time sizes, shared memory, rings.
#pragma once

#include "core/cuda/ptx.cuh"
#include "ops/gemm/cuda/grouped_params.h"
#include "ops/gemm/cuda/grouped_units.cuh"

namespace waybill::cuda {

template <GemmForm kForm_, GemmOutput kOutput_, int kBlockN_, int kStages_, int kCluster_, int kBuffers_, GemmEpilogue kEpilogue_ = GemmEpilogue::kPlain>
struct GroupedConfig {
  static constexpr GemmForm kForm = kForm_;
  static constexpr GemmOutput kOutput = kOutput_;
  static constexpr int kBlockN = kBlockN_, kStages = kStages_, kCluster = kCluster_, kBuffers = kBuffers_;
  static constexpr GemmEpilogue kEpilogue = kEpilogue_;
  static constexpr bool kCutsLastRound = false;
  static constexpr int kPairs = kEpilogue == GemmEpilogue::kActivationGradient ? kBuffers / 2 : 1;             // of buffers for the pre-activation, a warp
  static constexpr bool kFetches = kForm == GemmForm::kTN && kOutput == GemmOutput::kAddF32 && kBuffers == 4;  // grouped_accumulate.cuh
  static constexpr int kSumBuffers = kFetches ? kBuffers : 1;
  static constexpr bool kMajorA = kForm != GemmForm::kTN, kMajorB = kForm == GemmForm::kNT;  // K-major
  static constexpr int kBytesA = gemm_limits::kBlockM * gemm_limits::kBlockBytes, kBytesB = kBlockN * gemm_limits::kBlockBytes;
  static constexpr int kThreads = 384, kMathWarps = gemm_limits::kMathWarps;
  static constexpr int kProducerRegisters = 56, kMathRegisters = 224;  // a thread; together what the threads start with
  static_assert(kEpilogue == GemmEpilogue::kPlain || (kForm != GemmForm::kTN && kOutput == GemmOutput::kBf16));
  static_assert(kBlockN % 64 == 0 && (kCluster == 1 || kCluster == 2));
};

inline constexpr int kUnitSlots = 4;
inline constexpr int kGatherThreads = 64;  // warps 2 and 3

template <class C>
struct GroupedShared {
  std::uint8_t stages[C::kStages][C::kBytesA + C::kBytesB];
  std::uint8_t buffers[C::kMathWarps][C::kBuffers][gemm_limits::kBufferBytes];
  std::uint64_t full[C::kStages], empty[C::kStages], h_full[C::kMathWarps][C::kPairs];
  std::uint64_t sums_full[C::kMathWarps][C::kSumBuffers];  // D's values for grouped_accumulate.cuh
  std::uint64_t unit_full[kUnitSlots], unit_empty[kUnitSlots], unit_wanted, ticket_full[2], ticket_empty[2];
  Unit units[kUnitSlots];
  std::uint32_t ticket[2];
  int came_second[2];
  unsigned h_phases[C::kMathWarps], sums_phases[C::kMathWarps];  // a bit a pair of buffers, a buffer: the phase of its barrier to wait for
  std::uint32_t dead_rows[C::kStages][2];                        // kTN through a list: bit 4 i + r of word w: row 8 i + 4 w + r of the k block is a padding row
};

// The value of lane 0, known to be the same in all lanes: what branches around matrix instructions must depend on.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(ptx::kFullWarp, value, 0); }

// Position in a ring of kSlots; `parity` is that of the barrier phase to wait for.
template <int kSlots>
struct Ring {
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

}  // namespace waybill::cuda
