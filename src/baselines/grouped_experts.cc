// SPDX-License-Identifier: Apache-2.0
#include "baselines/grouped_experts.h"

#include "waybill/grouped_gemm.h"

namespace waybill::baselines {

void GroupedExperts::forward(const MoeTensors& parameters, std::vector<std::int32_t> offsets, const TensorView& rows, const float* weight, const TensorView& y,
                             PhaseTimes* times) {
  offsets_ = std::move(offsets);
  const std::int64_t S = rows.shape[0];
  const TensorView ends = TensorView::of(offsets_.data(), {static_cast<std::int64_t>(offsets_.size())});
  h_.resize(DType::kF32, {S, config_.inner_width()});
  a_.resize(DType::kF32, {S, config_.F});
  {
    const PhaseScope scope(times, Phase::kExpertGemm);
    grouped_gemm({.a = rows, .weights = parameters.w1, .offsets = ends, .y = h_, .a_rows = {}, .bias = {}}, stream_);
  }
  {
    const PhaseScope scope(times, Phase::kActivation);
    activation_forward(config_.activation, h_, weight, a_, stream_);
  }
  const PhaseScope scope(times, Phase::kExpertGemm);
  grouped_gemm({.a = a_, .weights = parameters.w2, .offsets = ends, .y = y, .a_rows = {}, .bias = {}}, stream_);
}

void GroupedExperts::backward(const MoeTensors& parameters, const MoeTensors& gradients, const TensorView& rows, const float* weight, const TensorView& dy,
                              const TensorView& d_rows, float* d_weight, PhaseTimes* times) {
  const TensorView ends = TensorView::of(offsets_.data(), {static_cast<std::int64_t>(offsets_.size())});
  da_.resize(DType::kF32, {rows.shape[0], config_.F});
  dh_.resize(DType::kF32, {rows.shape[0], config_.inner_width()});
  {
    const PhaseScope scope(times, Phase::kExpertGemm);
    grouped_gemm_dgrad({.dy = dy, .weights = parameters.w2, .offsets = ends, .da = da_}, stream_);
    grouped_gemm_wgrad({.a = a_, .dy = dy, .offsets = ends, .d_weights = gradients.w2, .a_rows = {}, .d_bias = {}, .accumulate = true}, stream_);
  }
  {
    const PhaseScope scope(times, Phase::kActivation);
    activation_backward(config_.activation, h_, weight, da_, dh_, d_weight, stream_);
  }
  const PhaseScope scope(times, Phase::kExpertGemm);
  grouped_gemm_wgrad({.a = rows, .dy = dh_, .offsets = ends, .d_weights = gradients.w1, .a_rows = {}, .d_bias = {}, .accumulate = true}, stream_);
  grouped_gemm_dgrad({.dy = dh_, .weights = parameters.w1, .offsets = ends, .da = d_rows}, stream_);
}

}  // namespace waybill::baselines
