// SPDX-License-Identifier: Apache-2.0
#include "waybill/phase.h"

namespace waybill {

const char* to_string(Phase phase) {
  switch (phase) {
    case Phase::kGate:
      return "gate";
    case Phase::kRouter:
      return "router";
    case Phase::kPlan:
      return "plan";
    case Phase::kDispatch:
      return "dispatch";
    case Phase::kExpertGemm:
      return "expert_gemm";
    case Phase::kActivation:
      return "activation";
    case Phase::kCombine:
      return "combine";
    case Phase::kShared:
      return "shared";
    case Phase::kAttention:
      return "attention";
    case Phase::kDense:
      return "dense";
    case Phase::kEmbedding:
      return "embedding";
    case Phase::kGradReduce:
      return "grad_reduce";
    case Phase::kOptimizer:
      return "optimizer";
    case Phase::kOther:
      return "other";
  }
  return "unknown phase";
}

}  // namespace waybill
