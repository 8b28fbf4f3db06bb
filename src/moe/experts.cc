// SPDX-License-Identifier: Apache-2.0
#include "moe/experts.h"

#include "moe/second_bias.h"

namespace waybill::moe {
namespace {

TensorView offsets_view(const ReceiveLayout& layout) { return TensorView::of(layout.expert_offsets.data(), {layout.L + 1}); }
TensorView slot_row_view(const ReceiveLayout& layout) { return TensorView::of(layout.slot_row.data(), {layout.S_padded()}); }

}  // namespace

void experts_first_matmul(const ExpertContext& c, const TensorView& rows, Tensor& h) {
  const PhaseScope scope(c.times, Phase::kExpertGemm);
  h.resize(DType::kF32, {c.layout.S_padded(), c.config.inner_width()});
  GroupedGemmArgs args;
  args.a = rows;
  args.weights = c.parameters.w1;
  args.offsets = offsets_view(c.layout);
  args.y = h;
  args.a_rows = slot_row_view(c.layout);
  args.bias = c.parameters.b1;
  grouped_gemm(args, c.stream);
}

void experts_activation(const ExpertContext& c, const TensorView& h, Tensor& a) {
  const PhaseScope scope(c.times, Phase::kActivation);
  a.resize(DType::kF32, {c.layout.S_padded(), c.config.local_F()});
  activation_forward(c.config.activation, h, c.layout.slot_weight.data(), a, c.stream);
}

void experts_second_matmul(const ExpertContext& c, const TensorView& a, ExpertScratch& scratch, Tensor& z) {
  const std::int64_t W = c.config.row_width();
  scratch.y.resize(DType::kF32, {c.layout.S_padded(), W});
  {
    const PhaseScope scope(c.times, Phase::kExpertGemm);
    GroupedGemmArgs args;
    args.a = a;
    args.weights = c.parameters.w2;
    args.offsets = offsets_view(c.layout);
    args.y = scratch.y;
    grouped_gemm(args, c.stream);
    if (c.second_bias) add_second_bias(c.layout, c.parameters.b2, scratch.y, c.stream);
  }
  const PhaseScope scope(c.times, Phase::kCombine);
  z.resize(DType::kF32, {c.layout.R(), W});
  unpermute_reduce(c.layout, scratch.y, /*weighted=*/false, z, c.stream);
}

void experts_backward(const ExpertContext& c, const MoeTensors& gradients, const TensorView& rows, const TensorView& h, const TensorView& a,
                      const TensorView& dz, ExpertScratch& scratch, float* d_weight, Tensor& d_rows) {
  const std::int64_t W = c.config.row_width(), S = c.layout.S_padded();
  scratch.da.resize(DType::kF32, {S, c.config.local_F()});
  scratch.dh.resize(DType::kF32, {S, c.config.inner_width()});
  scratch.y.resize(DType::kF32, {S, W});
  {
    // The gradient of slot s at the second matmul's output is dz[slot_row[s]] (the weight sits in front of that matmul). Reading
    // w2 [L, W, F] as [L, C, N] makes its transpose product and its gradient calls that gather dz: no [S, W] copy of dz.
    const PhaseScope scope(c.times, Phase::kExpertGemm);
    GroupedGemmArgs dgrad;
    dgrad.a = dz;
    dgrad.weights = c.parameters.w2;
    dgrad.offsets = offsets_view(c.layout);
    dgrad.y = scratch.da;
    dgrad.layout = WeightLayout::kLCN;
    dgrad.a_rows = slot_row_view(c.layout);
    grouped_gemm(dgrad, c.stream);
    GroupedGemmWgradArgs wgrad;
    wgrad.a = dz;
    wgrad.dy = a;
    wgrad.offsets = dgrad.offsets;
    wgrad.d_weights = gradients.w2;
    wgrad.layout = WeightLayout::kLCN;
    wgrad.a_rows = dgrad.a_rows;
    wgrad.accumulate = true;
    grouped_gemm_wgrad(wgrad, c.stream);
  }
  {
    const PhaseScope scope(c.times, Phase::kActivation);
    activation_backward(c.config.activation, h, c.layout.slot_weight.data(), scratch.da, scratch.dh, d_weight, c.stream);
    if (c.second_bias) second_bias_backward(c.layout, c.parameters.b2, dz, gradients.b2, d_weight, c.stream);
  }
  {
    const PhaseScope scope(c.times, Phase::kExpertGemm);
    GroupedGemmWgradArgs wgrad;
    wgrad.a = rows;
    wgrad.dy = scratch.dh;
    wgrad.offsets = offsets_view(c.layout);
    wgrad.d_weights = gradients.w1;
    wgrad.a_rows = slot_row_view(c.layout);
    wgrad.d_bias = gradients.b1;
    wgrad.accumulate = true;
    grouped_gemm_wgrad(wgrad, c.stream);
    GroupedGemmDgradArgs dgrad;
    dgrad.dy = scratch.dh;
    dgrad.weights = c.parameters.w1;
    dgrad.offsets = wgrad.offsets;
    dgrad.da = scratch.y;
    grouped_gemm_dgrad(dgrad, c.stream);
  }
  const PhaseScope scope(c.times, Phase::kCombine);
  d_rows.resize(DType::kF32, {c.layout.R(), W});
  unpermute_reduce(c.layout, scratch.y, /*weighted=*/false, d_rows, c.stream);
}

double expert_forward_flops(const MoeConfig& config, std::int64_t slots) {
  return 2.0 * static_cast<double>(slots) * static_cast<double>(config.row_width()) * static_cast<double>(config.inner_width() + config.local_F());
}

}  // namespace waybill::moe
