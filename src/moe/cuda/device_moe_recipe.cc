// SPDX-License-Identifier: Apache-2.0
#include "moe/cuda/device_moe_recipe.h"

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "moe/recipe_operands.h"
#include "waybill/grouped_gemm_activation.h"
#include "waybill/quantize_activated.h"
#include "waybill/quantize_gathered.h"

namespace waybill::cuda {
namespace {

using moe::Draws;

constexpr std::int64_t kBlock = 128;

std::uint64_t number(Draws draws) { return static_cast<std::uint64_t>(draws); }
Stream on(const ExpertSet& set, cudaStream_t stream) { return Stream{set.device, stream, nullptr}; }
const std::int32_t* num_rows(const ExpertSet& set) { return set.offsets.as<std::int32_t>() + set.L; }
const std::int32_t* list_of(const TensorView& list) { return static_cast<const std::int32_t*>(list ? list.data : nullptr); }

}  // namespace

RecipeMatmuls::RecipeMatmuls(const MoeConfig& config, int P) : config_(config), layout_(recipe_layout(config, P)), L_(config.L(P)) {}

// ---- fp8

QuantizedOperand RecipeMatmuls::rows_operand(const ExpertSet& set, Operand operand, std::int64_t C) const {
  QuantizedOperand x;
  x.config = format(operand, Contraction::kColumns);
  x.q.codes = TensorView(set.scratch + layout_.rows, DType::kU8, {set.S, C}, set.device);
  x.q.scales = TensorView(set.scratch + layout_.rows_scales, DType::kF32, {set.S, (C + kBlock - 1) / kBlock}, set.device);
  x.q.scales.stride[0] = 1, x.q.scales.stride[1] = set.S;  // those of adjacent rows adjacent, as the matmul loads them
  return x;
}

QuantizedOperand RecipeMatmuls::turned_operand(const ExpertSet& set, Operand operand, std::int64_t C, Side side) const {
  const std::int64_t B = max_block_rows(set.S, set.L, kBlock);
  unsigned char *codes = set.scratch + layout_.left, *scales = set.scratch + layout_.left_scales;
  if (side == Side::kRight) codes = set.scratch + layout_.right, scales = set.scratch + layout_.right_scales;
  if (side == Side::kX && set.x_turned != codes) codes = set.x_turned, scales = set.scratch + layout_.x_scales;
  QuantizedOperand x;
  x.config = format(operand, Contraction::kRows);
  x.q.turned = TensorView(codes, DType::kU8, {B, C, kBlock}, set.device), x.q.scales = TensorView(scales, DType::kF32, {B, C}, set.device);
  return x;
}

QuantizedOperand RecipeMatmuls::weight_operand(const ExpertSet& set, RecipeWeight which, std::int64_t N, std::int64_t C) const {
  const RecipeWeightLayout& at = layout_.weights[static_cast<int>(which)];
  const std::int64_t n_blocks = (N + kBlock - 1) / kBlock;
  QuantizedOperand w;
  w.config = format(Operand::kWeight, Contraction::kColumns);
  w.q.codes = TensorView(set.scratch + at.codes, DType::kU8, {set.L * N, C}, set.device);
  w.q.turned = TensorView(set.scratch + at.turned, DType::kU8, {set.L * n_blocks, C, kBlock}, set.device);
  w.q.scales = TensorView(set.scratch + at.scales, DType::kF32, {set.L * n_blocks, (C + kBlock - 1) / kBlock}, set.device);
  return w;
}

QuantizedOperand RecipeMatmuls::quantize_rows(const ExpertSet& set, const ListedRows& x, Operand operand, cudaStream_t stream) const {
  part(set, /*is_product=*/false, stream);
  QuantizedOperand out = rows_operand(set, operand, x.values.shape[1]);
  if (x.list) {
    quantize_gathered(out.config, x.values, x.list, set.offsets, out.q, on(set, stream), set.status);
  } else {
    quantize(out.config, x.values, set.offsets, out.q, on(set, stream), set.status);
  }
  return out;
}

void RecipeMatmuls::quantize_turned(const ExpertSet& set, const ListedRows& x, Operand operand, Side side, cudaStream_t stream) const {
  QuantizedOperand out = turned_operand(set, operand, x.values.shape[1], side);
  if (x.list) {
    quantize_gathered(out.config, x.values, x.list, set.offsets, out.q, on(set, stream), set.status);
  } else {
    quantize(out.config, x.values, set.offsets, out.q, on(set, stream), set.status);
  }
}

bool RecipeMatmuls::fits_a(const ExpertSet& set) const {
  return is_fp8() && max_block_rows(set.S, set.L, kBlock) * (kBlock + static_cast<std::int64_t>(sizeof(float))) <= set.S * 2;
}

// Biases' gradients read dh. The partial sums of d_weight lie where dy along the slots was.
bool RecipeMatmuls::fuses_gradient(const ExpertSet& set) const {
  const bool has_bias = config_.expert_bias && set.w1 == RecipeWeight::kW1;
  return is_fp8() && !has_bias && set.F % kBlock == 0 && set.F <= 16 * set.W;
}

QuantizedOperand RecipeMatmuls::activation_operand(const ExpertSet& set, const TensorView& a) const {
  QuantizedOperand x = turned_operand(set, Operand::kActivation, set.F, Side::kRight);
  if (!set.keeps_a) return x;
  x.q.turned.data = a.data;
  x.q.scales.data = static_cast<unsigned char*>(a.data) + x.q.turned.size();
  return x;
}

void RecipeMatmuls::wgrad(const ExpertSet& set, const QuantizedOperand& a, const QuantizedOperand& dy, const TensorView& d_weights, bool accumulate,
                          cudaStream_t stream) const {
  QuantizedWgradArgs args;
  args.a = a, args.dy = dy, args.offsets = set.offsets, args.d_weights = d_weights, args.accumulate = accumulate, args.status = set.status;
  part(set, /*is_product=*/true, stream);
  quantized_gemm_wgrad(args, on(set, stream));
}

// ---- mxfp8, nvfp4

TensorView RecipeMatmuls::wide_weights(const ExpertSet& set, RecipeWeight which, std::int64_t N, std::int64_t C, Contraction contraction) const {
  const RecipeWeightLayout& at = layout_.weights[static_cast<int>(which)];
  return TensorView(set.scratch + (contraction == Contraction::kColumns ? at.forward : at.backward), DType::kBF16, {set.L, N, C}, set.device);
}

TensorView RecipeMatmuls::wide_offsets(const ExpertSet& set) const {
  if (!fills_groups()) return set.offsets;
  return TensorView(set.scratch + layout_.group_offsets, DType::kI32, {set.L + 1}, set.device);
}

TensorView RecipeMatmuls::widened(const ExpertSet& set, const ListedRows& x, Operand operand, Contraction contraction, std::uint64_t draws, Side side,
                                  cudaStream_t stream) const {
  const std::int64_t C = x.values.shape[1];
  const QuantConfig f = format(operand, contraction);
  part(set, /*is_product=*/false, stream);
  QdqCall call{};
  call.x = {x.values.data, true, C, set.S, static_cast<int>(C), set.offsets.as<std::int32_t>(), static_cast<int>(set.L), set.status, list_of(x.list)};
  call.y = set.scratch + (side == Side::kLeft ? layout_.left : layout_.right);
  call.element = f.element, call.scale = f.scale, call.rule = f.rule;
  call.block_rows = static_cast<int>(f.block_rows), call.block_columns = static_cast<int>(f.block_columns);
  call.stochastic = f.stochastic, call.hadamard = contraction == Contraction::kRows && fills_groups();
  call.seed = set.seed, call.draws = draws, call.first_id = set.first_id, call.id_stride = set.id_stride;
  call.group_scales = reinterpret_cast<float*>(set.scratch + layout_.group_scales);
  call.y_offsets = reinterpret_cast<std::int32_t*>(set.scratch + layout_.group_offsets);
  launch_qdq(call, stream);
  check_launch("qdq");
  return TensorView(call.y, DType::kBF16, {set.S + (call.hadamard ? (kHadamardRows - 1) * std::min(set.L, set.S) : 0), C}, set.device);
}

// ---- both

void RecipeMatmuls::quantize_weights(const TensorView& w, RecipeWeight which, const ExpertSet& set, cudaStream_t stream) const {
  const std::int64_t L = w.shape[0], N = w.shape[1], C = w.shape[2];
  const RecipeWeightLayout& at = layout_.weights[static_cast<int>(which)];
  const TensorView flat(w.data, w.dtype, {L * N, C}, set.device), firsts(set.scratch + at.firsts, DType::kI32, {L + 1}, set.device);
  if (is_fp8()) {
    const QuantizedOperand out = weight_operand(set, which, N, C);
    return quantize(out.config, flat, firsts, out.q, on(set, stream), set.status);
  }
  for (const Contraction contraction : {Contraction::kColumns, Contraction::kRows}) {
    if (contraction == Contraction::kRows && at.backward == at.forward) continue;
    const QuantConfig f = format(Operand::kWeight, contraction);
    QdqCall call{};
    call.x = {w.data, true, C, L * N, static_cast<int>(C), firsts.as<std::int32_t>(), static_cast<int>(L), set.status};
    call.y = set.scratch + (contraction == Contraction::kColumns ? at.forward : at.backward);
    call.element = f.element, call.scale = f.scale, call.rule = f.rule;
    call.block_rows = static_cast<int>(f.block_rows), call.block_columns = static_cast<int>(f.block_columns);
    call.group_scales = reinterpret_cast<float*>(set.scratch + layout_.weight_group_scales);
    launch_qdq(call, stream);
    check_launch("qdq");
  }
}

void RecipeMatmuls::part(const ExpertSet& set, bool is_product, cudaStream_t stream) const {
  if (on_part && set.w1 == RecipeWeight::kW1) on_part(is_product, stream);
}

void RecipeMatmuls::first(const ExpertSet& set, const ListedRows& x, const TensorView& h, bool keep_h, const TensorView& a, const TensorView& weight,
                          const TensorView& bias, cudaStream_t stream) const {
  if (is_fp8()) {
    QuantizedGemmArgs args;
    args.a = quantize_rows(set, x, Operand::kActivation, stream), args.weights = weight_operand(set, set.w1, set.inner, set.W);
    args.offsets = set.offsets, args.y = h, args.bias = bias, args.status = set.status;
    part(set, /*is_product=*/true, stream);
    return quantized_gemm(args, on(set, stream));
  }
  GroupedGemmActivationArgs args;
  args.product.a = widened(set, x, Operand::kActivation, Contraction::kColumns, 0, Side::kLeft, stream);
  args.product.weights = wide_weights(set, set.w1, set.inner, set.W, Contraction::kColumns), args.product.offsets = set.offsets,
  args.product.status = set.status;
  args.product.bias = bias;
  if (keep_h) args.product.y = h;
  args.activation = config_.activation, args.out = a, args.weight = weight;
  part(set, /*is_product=*/true, stream);
  grouped_gemm_activation(args, on(set, stream));
}

void RecipeMatmuls::second(const ExpertSet& set, const TensorView& h, const TensorView& weight, const TensorView& a, const TensorView& y, bool accumulate,
                           cudaStream_t stream) const {
  if (is_fp8()) {
    part(set, /*is_product=*/false, stream);
    QuantizedGemmArgs args;
    args.a = rows_operand(set, Operand::kActivation, set.F), args.weights = weight_operand(set, set.w2, set.W, set.F);
    ActivatedRows x;
    x.activation = config_.activation, x.h = h, x.weight = weight;
    if (set.keeps_a) {
      const QuantizedOperand turned = activation_operand(set, a);
      quantize_both_activated(args.a.config, turned.config, x, set.offsets, args.a.q, turned.q, on(set, stream), set.status);
    } else {
      quantize_activated(args.a.config, x, set.offsets, args.a.q, on(set, stream), set.status);
    }
    args.offsets = set.offsets, args.y = y, args.accumulate = accumulate, args.status = set.status;
    part(set, /*is_product=*/true, stream);
    return quantized_gemm(args, on(set, stream));
  }
  GroupedGemmArgs args;
  args.a = widened(set, {a, {}}, Operand::kActivation, Contraction::kColumns, 0, Side::kRight, stream);
  args.weights = wide_weights(set, set.w2, set.W, set.F, Contraction::kColumns), args.offsets = set.offsets;
  args.y = y, args.accumulate = accumulate, args.status = set.status;
  part(set, /*is_product=*/true, stream);
  grouped_gemm(args, on(set, stream));
}

void RecipeMatmuls::quantize_a(const ExpertSet& set, const TensorView& h, const TensorView& weight, cudaStream_t stream) const {
  if (!is_fp8() || set.keeps_a) return;
  const QuantizedOperand out = activation_operand(set, {});
  ActivatedRows x;
  x.activation = config_.activation, x.h = h, x.weight = weight;
  quantize_activated(out.config, x, set.offsets, out.q, on(set, stream), set.status);
}
void RecipeMatmuls::quantize_x(const ExpertSet& set, const ListedRows& x, cudaStream_t stream) const {
  if (is_fp8()) quantize_turned(set, x, Operand::kActivation, Side::kX, stream);
}

void RecipeMatmuls::quantize_gradient(const ExpertSet& set, const TensorView& da, const TensorView& h, const TensorView& weight, const TensorView& d_weight,
                                      cudaStream_t stream) const {
  const QuantizedOperand rows = rows_operand(set, Operand::kGradient, set.inner), turned = turned_operand(set, Operand::kGradient, set.inner, Side::kRight);
  ActivatedRows x;
  x.activation = config_.activation, x.h = h, x.weight = weight, x.da = da, x.d_weight = d_weight;
  x.partial_sums = TensorView(set.scratch + layout_.left, DType::kF32, {set.S, (set.F + 63) / 64}, set.device);
  quantize_both_activated(rows.config, turned.config, x, set.offsets, rows.q, turned.q, on(set, stream), set.status);
}

void RecipeMatmuls::second_gradients(const ExpertSet& set, const ListedRows& dy, const TensorView& a, const TensorView& h, const TensorView& weight,
                                     const TensorView& d_weight, const TensorView& d_w2, bool accumulate, cudaStream_t stream) const {
  if (is_fp8()) {
    part(set, /*is_product=*/false, stream);
    const QuantizedOperand rows = rows_operand(set, Operand::kGradient, set.W), turned = turned_operand(set, Operand::kGradient, set.W, Side::kLeft);
    if (dy.list) {
      quantize_both_gathered(rows.config, turned.config, dy.values, dy.list, set.offsets, rows.q, turned.q, on(set, stream), set.status);
    } else {
      quantize_both(rows.config, turned.config, dy.values, set.offsets, rows.q, turned.q, on(set, stream), set.status);
    }
    wgrad(set, activation_operand(set, a), turned, d_w2, accumulate, stream);
    QuantizedDgradArgs args;  // into the memory of a, which nothing reads any more
    args.dy = rows, args.weights = weight_operand(set, set.w2, set.W, set.F), args.offsets = set.offsets, args.da = a, args.status = set.status;
    part(set, /*is_product=*/true, stream);
    quantized_gemm_dgrad(args, on(set, stream));
    part(set, /*is_product=*/false, stream);
    if (fuses_gradient(set)) return quantize_gradient(set, a, h, weight, d_weight, stream);
    return activation_backward(config_.activation, h, static_cast<const float*>(weight ? weight.data : nullptr), a, h,
                               static_cast<float*>(d_weight ? d_weight.data : nullptr), on(set, stream), num_rows(set));
  }
  GroupedGemmWgradArgs w2;
  w2.dy = widened(set, dy, Operand::kGradient, Contraction::kRows, number(Draws::kSecondWgrad), Side::kLeft, stream);
  w2.a = widened(set, {a, {}}, Operand::kActivation, Contraction::kRows, number(Draws::kSecondWgrad), Side::kRight, stream);
  w2.offsets = wide_offsets(set), w2.d_weights = d_w2, w2.accumulate = accumulate, w2.status = set.status;
  part(set, /*is_product=*/true, stream);
  grouped_gemm_wgrad(w2, on(set, stream));
  GroupedGemmActivationBackwardArgs act;
  act.product.a = widened(set, dy, Operand::kGradient, Contraction::kColumns, number(Draws::kSecondDgrad), Side::kLeft, stream);
  act.product.weights = wide_weights(set, set.w2, set.W, set.F, Contraction::kRows), act.product.layout = WeightLayout::kLCN;
  act.product.offsets = set.offsets, act.product.y = a, act.product.status = set.status;
  act.activation = config_.activation, act.h = act.dh = h, act.weight = weight, act.d_weight = d_weight;
  part(set, /*is_product=*/true, stream);
  grouped_gemm_activation_backward(act, on(set, stream));
}

void RecipeMatmuls::quantize_dh(const ExpertSet& set, const TensorView& dh, cudaStream_t stream) const {
  if (!is_fp8() || fuses_gradient(set)) return;
  part(set, /*is_product=*/false, stream);
  const QuantizedOperand rows = rows_operand(set, Operand::kGradient, set.inner), turned = turned_operand(set, Operand::kGradient, set.inner, Side::kRight);
  quantize_both(rows.config, turned.config, dh, set.offsets, rows.q, turned.q, on(set, stream), set.status);
}

void RecipeMatmuls::first_weight_gradients(const ExpertSet& set, const ListedRows& x, const TensorView& dh, const TensorView& d_w1, bool accumulate,
                                           cudaStream_t stream) const {
  if (is_fp8()) {
    return wgrad(set, turned_operand(set, Operand::kActivation, set.W, Side::kX), turned_operand(set, Operand::kGradient, set.inner, Side::kRight), d_w1,
                 accumulate, stream);
  }
  GroupedGemmWgradArgs w1;
  w1.a = widened(set, x, Operand::kActivation, Contraction::kRows, number(Draws::kFirstWgrad), Side::kLeft, stream);
  w1.dy = widened(set, {dh, {}}, Operand::kGradient, Contraction::kRows, number(Draws::kFirstWgrad), Side::kRight, stream);
  w1.offsets = wide_offsets(set), w1.d_weights = d_w1, w1.accumulate = accumulate, w1.status = set.status;
  part(set, /*is_product=*/true, stream);
  grouped_gemm_wgrad(w1, on(set, stream));
}

void RecipeMatmuls::row_gradients(const ExpertSet& set, const TensorView& dh, const TensorView& d_rows, bool accumulate, cudaStream_t stream) const {
  if (is_fp8()) {
    QuantizedDgradArgs args;
    args.dy = rows_operand(set, Operand::kGradient, set.inner), args.weights = weight_operand(set, set.w1, set.inner, set.W);
    args.offsets = set.offsets, args.da = d_rows, args.accumulate = accumulate, args.status = set.status;
    part(set, /*is_product=*/true, stream);
    return quantized_gemm_dgrad(args, on(set, stream));
  }
  GroupedGemmDgradArgs d;
  d.dy = widened(set, {dh, {}}, Operand::kGradient, Contraction::kColumns, number(Draws::kFirstDgrad), Side::kRight, stream);
  d.weights = wide_weights(set, set.w1, set.inner, set.W, Contraction::kRows), d.offsets = set.offsets, d.da = d_rows;
  d.accumulate = accumulate, d.status = set.status;
  part(set, /*is_product=*/true, stream);
  grouped_gemm_dgrad(d, on(set, stream));
}

}  // namespace waybill::cuda
