// SPDX-License-Identifier: Apache-2.0
#include "moe/recipe_operands.h"

#include <limits>

#include "waybill/random.h"

namespace waybill::moe {
namespace {

constexpr std::uint64_t kHadamardStream = 0x100;  // beside the streams of Draws

TensorView list_view(std::vector<std::int32_t>& list) { return TensorView::of(list.data(), {static_cast<std::int64_t>(list.size())}); }

}  // namespace

// A function of seed, product and expert: it depends neither on ranks nor on threads.
const std::uint64_t* RecipeOperands::seeds_of(Draws draws) const {
  scratch_.seeds.resize(ids_.size());
  const std::uint64_t stream = random_u64(seed_, static_cast<std::uint64_t>(draws));
  for (std::size_t l = 0; l < ids_.size(); ++l) scratch_.seeds[l] = random_u64(stream, static_cast<std::uint64_t>(ids_[l]));
  return scratch_.seeds.data();
}

// Each slot itself, -1 where it is padding.
TensorView RecipeOperands::valid_rows() const {
  if (!slot_row_) return {};
  const std::int32_t* rows = slot_row_.as<std::int32_t>();
  scratch_.valid_rows.resize(static_cast<std::size_t>(slot_row_.shape[0]));
  for (std::size_t s = 0; s < scratch_.valid_rows.size(); ++s) scratch_.valid_rows[s] = rows[s] < 0 ? -1 : static_cast<std::int32_t>(s);
  return list_view(scratch_.valid_rows);
}

TensorView RecipeOperands::rounded(const TensorView& x, Tensor& out) const {
  out.resize(DType::kBF16, {x.shape[0], x.shape[1]});
  round_to_bf16(x, out, stream_);
  return out;
}

// Blocks along a row depend on nothing but the row, so a received row is rounded once for all its slots; only nvfp4, whose scales hang on the
// expert's largest value, rounds slot by slot.
RowOperand RecipeOperands::row_operand(const TensorView& x, const TensorView& rows, Operand operand, Draws draws) const {
  if (config_.kind == Recipe::kF32) return {x, rows};
  if (config_.kind == Recipe::kBF16) return {rounded(x, scratch_.left), rows};
  const QuantConfig format = operand_format(config_, operand, Contraction::kColumns);
  QuantizeDequantizeArgs args;
  args.x = x;
  if (config_.kind != Recipe::kNVFP4) {
    scratch_.left.resize(DType::kF32, {x.shape[0], x.shape[1]});
    args.y = scratch_.left;
    quantize_dequantize(format, args, stream_);
    return {scratch_.left, rows};
  }
  const std::int64_t S = rows ? rows.shape[0] : x.shape[0];
  scratch_.left.resize(DType::kF32, {S, x.shape[1]});
  args.rows = rows;
  args.offsets = offsets_;
  args.y = scratch_.left;
  if (format.stochastic) args.group_seeds = seeds_of(draws);
  quantize_dequantize(format, args, stream_);
  return {scratch_.left, rows ? valid_rows() : TensorView{}};
}

TensorView RecipeOperands::weights(const TensorView& w, Contraction contraction) const {
  const std::int64_t L = w.shape[0], N = w.shape[1], C = w.shape[2];
  if (config_.kind == Recipe::kF32) return w;
  const TensorView flat(w.data, w.dtype, {L * N, C});
  if (config_.kind == Recipe::kBF16) return TensorView(rounded(flat, scratch_.weights).data, DType::kBF16, {L, N, C});
  WB_CHECK(L * N <= std::numeric_limits<std::int32_t>::max(), "recipe {}: {} local experts of {} rows make more than 2^31 - 1 rows of weights",
           to_string(config_.kind), L, N);
  scratch_.weight_offsets.resize(static_cast<std::size_t>(L) + 1);
  for (std::int64_t g = 0; g <= L; ++g) scratch_.weight_offsets[static_cast<std::size_t>(g)] = static_cast<std::int32_t>(g * N);
  scratch_.weights.resize(DType::kF32, {L * N, C});
  QuantizeDequantizeArgs args;
  args.x = flat;
  args.offsets = list_view(scratch_.weight_offsets);
  args.y = scratch_.weights;
  quantize_dequantize(operand_format(config_, Operand::kWeight, contraction), args, stream_);
  return TensorView(scratch_.weights.view().data, DType::kF32, {L, N, C});
}

TensorView RecipeOperands::along_slots(const TensorView& x, const TensorView& rows, Operand operand, Draws draws, Tensor& out) const {
  const QuantConfig format = operand_format(config_, operand, Contraction::kRows);
  QuantizeDequantizeArgs args;
  args.x = x;
  args.rows = rows;
  args.offsets = offsets_;
  if (config_.kind == Recipe::kNVFP4 && config_.hadamard) {
    scratch_.wgrad_offsets = hadamard_offsets(offsets_);
    const auto signs = static_cast<std::uint16_t>(random_u64(seed_, kHadamardStream + static_cast<std::uint64_t>(draws)));
    out.resize(DType::kF32, {scratch_.wgrad_offsets.back(), x.shape[1]});
    hadamard_rows(x, rows, offsets_, signs, out, stream_);
    args.x = out;
    args.rows = {};
    args.offsets = list_view(scratch_.wgrad_offsets);
  } else {
    out.resize(DType::kF32, {rows ? rows.shape[0] : x.shape[0], x.shape[1]});
  }
  args.y = out;
  if (format.stochastic) args.group_seeds = seeds_of(draws);
  quantize_dequantize(format, args, stream_);
  return out;
}

WgradOperands RecipeOperands::wgrad(const TensorView& gathered, Operand gathered_operand, const TensorView& slots, Operand slots_operand, Draws draws) const {
  if (config_.kind == Recipe::kF32) return {gathered, slots, slot_row_, offsets_};
  if (config_.kind == Recipe::kBF16) return {rounded(gathered, scratch_.left), rounded(slots, scratch_.right), slot_row_, offsets_};
  const TensorView left = along_slots(gathered, slot_row_, gathered_operand, draws, scratch_.left);
  // A padding slot reads as zeros on both sides, whatever `slots` holds there.
  const TensorView right = along_slots(slots, valid_rows(), slots_operand, draws, scratch_.right);
  const bool is_rotated = config_.kind == Recipe::kNVFP4 && config_.hadamard;
  return {left, right, {}, is_rotated ? list_view(scratch_.wgrad_offsets) : offsets_};
}

}  // namespace waybill::moe
