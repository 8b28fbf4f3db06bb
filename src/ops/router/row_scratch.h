// SPDX-License-Identifier: Apache-2.0
// Scratch of the fast CPU router: a few rows of [E] per task, never [T, E].
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/scalar_math.h"
#include "ops/router/router_impl.h"
#include "ops/router/row_kernels.h"

namespace waybill::router_impl {

inline std::int64_t padded_to_lanes(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
// About 16K logits a task, so that a task outweighs its hand-over.
inline std::int64_t rows_per_task(std::int64_t E) { return std::max<std::int64_t>(1, 16384 / E); }

// Per-expert inputs in the form the kernels take; built once a call.
struct ExpertVectors {
  Tensor memory;
  const float* bias = nullptr;          // [E], zeros where no bias was given
  const float* zeros = nullptr;         // [E]
  const std::uint32_t* keep = nullptr;  // [E] all ones, or 0 for masked experts

  ExpertVectors(const RouterConfig& config, const RouterInputs& inputs) : memory(DType::kF32, {2, config.E}) {
    float* zero = memory.as<float>();
    auto* mask = reinterpret_cast<std::uint32_t*>(zero + config.E);
    std::fill_n(zero, config.E, 0.0f);
    const auto* given = inputs.expert_mask ? static_cast<const std::uint8_t*>(inputs.expert_mask.data) : nullptr;
    for (std::int64_t e = 0; e < config.E; ++e) mask[e] = given != nullptr && given[e] != 0 ? 0u : 0xffffffffu;
    zeros = zero;
    bias = inputs.expert_bias ? static_cast<const float*>(inputs.expert_bias.data) : zero;
    keep = mask;
  }
};

struct RowScratch {
  Workspace workspace;
  Buffer memory;
  std::int64_t padded_k = 0;
  float* x = nullptr;                   // [E] a row widened to fp32
  std::uint32_t* keys = nullptr;        // [E]
  float* p = nullptr;                   // [E] full scores
  float* softmax = nullptr;             // [E]
  std::uint64_t* composites = nullptr;  // [E]
  std::uint32_t* buckets = nullptr;     // [2K, padded]
  // [K, padded]; the padding stays zero
  std::int32_t* ids = nullptr;
  float *selected_x = nullptr, *selected_scratch = nullptr, *selected_weights = nullptr;
  std::uint8_t* valid = nullptr;
  std::vector<GroupRank> groups;  // [G]

  explicit RowScratch(const RouterConfig& config) : padded_k(padded_to_lanes(config.K)), groups(static_cast<std::size_t>(config.num_groups)) {
    WorkspacePlan plan;
    const auto row_bytes = static_cast<std::size_t>(config.E) * sizeof(float);
    const auto slot_bytes = static_cast<std::size_t>(padded_k) * sizeof(float);
    const std::size_t at[] = {plan.book("x", row_bytes),
                              plan.book("keys", row_bytes),
                              plan.book("p", row_bytes),
                              plan.book("softmax", row_bytes),
                              plan.book("composites", 2 * row_bytes),
                              plan.book("ids", slot_bytes),
                              plan.book("selected_x", slot_bytes),
                              plan.book("selected_scratch", slot_bytes),
                              plan.book("weights", slot_bytes),
                              plan.book("valid", slot_bytes),
                              plan.book("buckets", 2 * slot_bytes)};
    memory = Buffer(plan.total_bytes());
    workspace = Workspace(memory.data(), memory.bytes());
    const auto E = static_cast<std::size_t>(config.E), K = static_cast<std::size_t>(padded_k);
    x = workspace.at<float>(at[0], E);
    keys = workspace.at<std::uint32_t>(at[1], E);
    p = workspace.at<float>(at[2], E);
    softmax = workspace.at<float>(at[3], E);
    composites = workspace.at<std::uint64_t>(at[4], E);
    ids = workspace.at<std::int32_t>(at[5], K);
    selected_x = workspace.at<float>(at[6], K);
    selected_scratch = workspace.at<float>(at[7], K);
    selected_weights = workspace.at<float>(at[8], K);
    valid = workspace.at<std::uint8_t>(at[9], K);
    buckets = workspace.at<std::uint32_t>(at[10], 2 * K);
    std::fill_n(ids, padded_k, -1);
    std::fill_n(selected_x, padded_k, 0.0f);
    std::fill_n(valid, padded_k, std::uint8_t{0});
  }

  // Row t in fp32: the logits themselves, or a widened copy.
  const float* load(const RowKernels& kernels, const TensorView& logits, std::int64_t t) {
    const std::int64_t begin = t * logits.stride[0], E = logits.shape[1];
    if (logits.dtype == DType::kF32) return static_cast<const float*>(logits.data) + begin;
    const auto* row = static_cast<const std::uint16_t*>(logits.data) + begin;
    if (logits.dtype == DType::kBF16)
      kernels.widen_bf16(row, E, x);
    else
      kernels.widen_f16(row, E, x);
    return x;
  }
};

}  // namespace waybill::router_impl
