// SPDX-License-Identifier: Apache-2.0
// Batched GEMM over rows that stand in equal groups, or in tight ones.
#pragma once

#include "baselines/grouped_experts.h"
#include "baselines/permuted_stack.h"

namespace waybill::baselines {

class BatchedStack : public PermutedStack {
 public:
  BatchedStack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool) : PermutedStack(config, ep, pool), experts_(config.moe, stream_) {}

 protected:
  ExpertRows lay_out(std::vector<std::int64_t> counts) const override;  // every expert as long as the fullest of this rank
  void experts_forward(const StackCall& call, const ExpertRows& layout, const TensorView& rows, const TensorView& y) final;
  void experts_backward(const StackCall& call, const MoeTensors& gradients, const ExpertRows& layout, const TensorView& rows, const TensorView& dy,
                        const TensorView& d_rows) final;

 private:
  GroupedExperts experts_;
};

}  // namespace waybill::baselines
