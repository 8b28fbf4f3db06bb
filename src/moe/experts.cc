// SPDX-License-Identifier: Apache-2.0
#include "moe/experts.h"

#include "moe/second_bias.h"
#include "ops/gemm/bias_grad.h"

namespace waybill::moe {
namespace {

TensorView offsets_view(const ReceiveLayout& layout) { return TensorView::of(layout.expert_offsets.data(), {layout.L + 1}); }
TensorView slot_row_view(const ReceiveLayout& layout) { return TensorView::of(layout.slot_row.data(), {layout.S_padded()}); }

RecipeOperands operands_of(const ExpertContext& c, ExpertScratch& scratch) {
  return RecipeOperands(c.config.recipe, offsets_view(c.layout), slot_row_view(c.layout), c.expert_ids, c.rounding_seed, scratch.operands, c.stream);
}

// The bias gradient sums the gradient itself, not the operand of the product beside it.
void first_bias_gradient(const ExpertContext& c, const TensorView& dh, const TensorView& d_b1) {
  GroupedGemmWgradArgs sum;
  sum.dy = dh;
  sum.offsets = offsets_view(c.layout);
  sum.a_rows = slot_row_view(c.layout);
  sum.d_bias = d_b1;
  sum.accumulate = true;
  detail::bias_grad(sum, c.stream.pool);
}

}  // namespace

void experts_first_matmul(const ExpertContext& c, const TensorView& rows, ExpertScratch& scratch, Tensor& h) {
  const PhaseScope scope(c.times, Phase::kExpertGemm);
  h.resize(DType::kF32, {c.layout.S_padded(), c.config.inner_width()});
  const RecipeOperands operands = operands_of(c, scratch);
  const RowOperand a = operands.gathered(rows, Operand::kActivation);
  GroupedGemmArgs args;
  args.a = a.values;
  args.weights = operands.weights(c.parameters.w1, Contraction::kColumns);
  args.offsets = offsets_view(c.layout);
  args.y = h;
  args.a_rows = a.rows;
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
    const RecipeOperands operands = operands_of(c, scratch);
    GroupedGemmArgs args;
    args.a = operands.slots(a, Operand::kActivation);
    args.weights = operands.weights(c.parameters.w2, Contraction::kColumns);
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
  const RecipeOperands operands = operands_of(c, scratch);
  {
    // The gradient of slot s at the second matmul's output is dz[slot_row[s]] (the weight sits in front of that matmul). Reading
    // w2 [L, W, F] as [L, C, N] makes its transpose product and its gradient calls that gather dz: no [S, W] copy of dz.
    const PhaseScope scope(c.times, Phase::kExpertGemm);
    const RowOperand d_output = operands.gathered(dz, Operand::kGradient, Draws::kSecondDgrad);
    GroupedGemmArgs dgrad;
    dgrad.a = d_output.values;
    dgrad.weights = operands.weights(c.parameters.w2, Contraction::kRows);
    dgrad.offsets = offsets_view(c.layout);
    dgrad.y = scratch.da;
    dgrad.layout = WeightLayout::kLCN;
    dgrad.a_rows = d_output.rows;
    grouped_gemm(dgrad, c.stream);
    const WgradOperands pair = operands.wgrad(dz, Operand::kGradient, a, Operand::kActivation, Draws::kSecondWgrad);
    GroupedGemmWgradArgs wgrad;
    wgrad.a = pair.gathered;
    wgrad.dy = pair.slots;
    wgrad.offsets = pair.offsets;
    wgrad.d_weights = gradients.w2;
    wgrad.layout = WeightLayout::kLCN;
    wgrad.a_rows = pair.rows;
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
    const WgradOperands pair = operands.wgrad(rows, Operand::kActivation, scratch.dh, Operand::kGradient, Draws::kFirstWgrad);
    GroupedGemmWgradArgs wgrad;
    wgrad.a = pair.gathered;
    wgrad.dy = pair.slots;
    wgrad.offsets = pair.offsets;
    wgrad.d_weights = gradients.w1;
    wgrad.a_rows = pair.rows;
    if (!operands.changes_operands()) wgrad.d_bias = gradients.b1;
    wgrad.accumulate = true;
    grouped_gemm_wgrad(wgrad, c.stream);
    if (operands.changes_operands() && gradients.b1) first_bias_gradient(c, scratch.dh, gradients.b1);
    GroupedGemmDgradArgs dgrad;
    dgrad.dy = operands.slots(scratch.dh, Operand::kGradient, Draws::kFirstDgrad);
    dgrad.weights = operands.weights(c.parameters.w1, Contraction::kRows);
    dgrad.offsets = offsets_view(c.layout);
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
