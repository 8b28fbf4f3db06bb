// SPDX-License-Identifier: Apache-2.0
// The phases of a step, under one set of names: tables, metrics.jsonl, traces and timeouts all use them.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "waybill/export.h"

namespace waybill {

enum class Phase : std::uint8_t {
  kGate,        // gate GEMM
  kRouter,      // scores, top-k, losses
  kPlan,        // route plan and counts exchange
  kDispatch,    // rows to the experts' ranks (and gradients back)
  kExpertGemm,  // grouped matmuls
  kActivation,  // SwiGLU and friends
  kCombine,     // local reduce and rows back
  kShared,      // shared experts, latent projections
  kAttention,
  kDense,       // dense feed-forward, norms
  kEmbedding,   // embedding, output projection, cross-entropy
  kGradReduce,  // gradient reduction over ranks
  kOptimizer,
  kOther,
};
inline constexpr std::size_t kNumPhases = static_cast<std::size_t>(Phase::kOther) + 1;
WB_API const char* to_string(Phase phase);

// Seconds spent per phase by one rank. `wait` is the part of it spent waiting for peers.
struct PhaseTimes {
  std::array<double, kNumPhases> seconds{};
  std::array<double, kNumPhases> wait_seconds{};
  void operator+=(const PhaseTimes& other) {
    for (std::size_t i = 0; i < kNumPhases; ++i) {
      seconds[i] += other.seconds[i];
      wait_seconds[i] += other.wait_seconds[i];
    }
  }
};

// Adds the lifetime of the object to one phase. `times` may be null.
class PhaseScope {
 public:
  PhaseScope(PhaseTimes* times, Phase phase) : times_(times), phase_(phase), start_(Clock::now()) {}
  ~PhaseScope() {
    if (times_ != nullptr) times_->seconds[static_cast<std::size_t>(phase_)] += std::chrono::duration<double>(Clock::now() - start_).count();
  }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  PhaseTimes* times_;
  Phase phase_;
  Clock::time_point start_;
};

}  // namespace waybill
