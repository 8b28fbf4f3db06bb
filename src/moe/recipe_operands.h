// SPDX-License-Identifier: Apache-2.0
// The operands of the expert matmuls as the layer's recipe multiplies them (waybill/recipe.h). Every operand is made from its fp32 source
// at the product that needs it, so that recompute, micro-batches and both directions of a block see the same source.
#pragma once

#include <span>
#include <vector>

#include "waybill/grouped_gemm.h"
#include "waybill/recipe.h"

namespace waybill::moe {

// Memory of the rounded copies of one product, reused by the next.
struct OperandScratch {
  Tensor left, right, weights;
  std::vector<std::int32_t> weight_offsets, wgrad_offsets, valid_rows;
  std::vector<std::uint64_t> seeds;
};

// Which random numbers an operand takes. No two products of a layer share any.
enum class Draws : std::uint8_t { kNone = 0, kSecondDgrad = 1, kSecondWgrad = 2, kFirstDgrad = 3, kFirstWgrad = 4 };

// Rows and the list through which a grouped GEMM reads them; as they came for fp32.
struct RowOperand {
  TensorView values, rows;
};

struct WgradOperands {
  TensorView gathered, slots;  // read with `offsets`; `gathered` through `rows` where given
  TensorView rows, offsets;
};

class RecipeOperands {
 public:
  // offsets [L + 1] and slot_row [S] (-1 = padding; null: a slot is its own row) of the layout; ids: what tells the groups apart whatever
  // the rank (global expert ids), for random numbers. Views live as long as the layout and until the scratch's next use.
  RecipeOperands(const RecipeConfig& config, const TensorView& offsets, const TensorView& slot_row, std::span<const std::int64_t> ids, std::uint64_t seed,
                 OperandScratch& scratch, Stream stream)
      : config_(config), offsets_(offsets), slot_row_(slot_row), ids_(ids), seed_(seed), scratch_(scratch), stream_(stream) {}

  // x [R, C] that the product gathers through slot_row, for a product over C.
  RowOperand gathered(const TensorView& x, Operand operand, Draws draws = Draws::kNone) const { return row_operand(x, slot_row_, operand, draws); }
  // x [S, C] in slot order, for a product over C.
  TensorView slots(const TensorView& x, Operand operand, Draws draws = Draws::kNone) const { return row_operand(x, {}, operand, draws).values; }
  // w [L, N, C]: contracted over C in forward (kColumns), over N in dgrad (kRows).
  TensorView weights(const TensorView& w, Contraction contraction) const;
  // gathered [R, *] and slots [S, *], for a product over an expert's slots.
  WgradOperands wgrad(const TensorView& gathered, Operand gathered_operand, const TensorView& slots, Operand slots_operand, Draws draws) const;

  bool changes_operands() const { return config_.kind != Recipe::kF32; }

 private:
  RowOperand row_operand(const TensorView& x, const TensorView& rows, Operand operand, Draws draws) const;
  TensorView along_slots(const TensorView& x, const TensorView& rows, Operand operand, Draws draws, Tensor& out) const;
  const std::uint64_t* seeds_of(Draws draws) const;
  TensorView valid_rows() const;
  TensorView rounded(const TensorView& x, Tensor& out) const;  // to bf16

  const RecipeConfig& config_;
  TensorView offsets_, slot_row_;
  std::span<const std::int64_t> ids_;
  std::uint64_t seed_;
  OperandScratch& scratch_;
  Stream stream_;
};

}  // namespace waybill::moe
