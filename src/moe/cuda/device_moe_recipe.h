// SPDX-License-Identifier: Apache-2.0
// The experts' matmuls of a blocked recipe (waybill/recipe.h): operands are made from their bf16 sources at the product that needs them, as
// src/moe/recipe_operands.cc does, in scratch that is booked by config alone.
//
//   fp8            codes and scales, 8-bit matrix instructions. Rows are quantised as the list of the exchange finds them, both ways from one read where
//                  a tensor is contracted both ways; weights once a forward, as they lie and turned. The activation and its gradient are quantised from
//                  h: neither is written, but for the gradient where biases need it or F does not fit the blocks
//   mxfp8, nvfp4   operands rounded and widened to bf16 again, bf16 kernels
#pragma once

#include <functional>

#include "moe/cuda/device_moe_layout.h"
#include "ops/quantize/cuda/qdq.h"
#include "waybill/quantized_gemm.h"

namespace waybill::cuda {

// Of one weight tensor [L, N, C].
struct RecipeWeightLayout {
  std::uint64_t codes, turned, scales;  // fp8: u8 [L N, C], [L ceil(N / 128), C, 128], f32 [L ceil(N / 128), ceil(C / 128)]
  std::uint64_t forward, backward;      // others: bf16 [L, N, C] under the blocks of forward and of dgrad; the same memory where the blocks are
  std::uint64_t firsts;                 // i32 [L + 1]: g N
};
enum class RecipeWeight : int { kW1 = 0, kW2 = 1, kSharedW1 = 2, kSharedW2 = 3 };
// Offsets into the recipe's part of a rank's scratch. `left` is as wide as rows are, `right` as h is.
struct RecipeLayout {
  RecipeWeightLayout weights[4];
  std::uint64_t rows, rows_scales;                                 // fp8: u8 [S, widest], f32 [ceil(widest / 128), S]
  std::uint64_t left, left_scales, right, right_scales, x_scales;  // fp8: turned codes [blocks, C, 128], f32 [blocks, C]; others: bf16 [S, C], filled groups
  std::uint64_t group_scales, weight_group_scales, group_offsets;  // nvfp4: f32 [L] twice, i32 [L + 1]
  std::size_t bytes;
};
RecipeLayout recipe_layout(const MoeConfig& config, int P);
// What the scratch y must hold in backward, before the rows' gradient: x turned (ExpertSet::x_turned).
std::size_t recipe_y_bytes(const MoeConfig& config, std::int64_t S, std::int64_t L);
// Refuses what the matmuls of the config's recipe do not take.
void check_device_recipe(const MoeConfig& config, int P);

// A pair of matmuls of one rank: its routed experts, or the shared one as a single group.
struct ExpertSet {
  TensorView offsets;                                  // [L + 1]
  std::int64_t L = 0, S = 0, W = 0, inner = 0, F = 0;  // S: room for rows
  RecipeWeight w1 = RecipeWeight::kW1, w2 = RecipeWeight::kW2;
  std::int64_t first_id = 0, id_stride = 1;  // of random numbers: the global ids of the groups
  StatusWord* status = nullptr;
  unsigned char* x_turned = nullptr;  // fp8: x along the slots; its scales: RecipeLayout::x_scales where this is not `left`
  bool keeps_a = false;               // fp8: the memory of `a` holds the activation along the slots from forward to backward
  unsigned char* scratch = nullptr;   // by RecipeLayout
  SeedSource seed{};
  Device device{};
};

// Rows [*, C] bf16, found through `list` [S] i32 (-1: zeros) where one is given.
struct ListedRows {
  TensorView values, list;
};

class RecipeMatmuls {
 public:
  RecipeMatmuls(const MoeConfig& config, int P);
  const RecipeLayout& layout() const { return layout_; }
  // Constants in scratch that nothing writes later. Waits.
  void prepare(unsigned char* scratch, int device) const;

  // The copies that every product below reads; from `which` on, bf16 [L, N, C].
  void quantize_weights(const TensorView& w, RecipeWeight which, const ExpertSet& set, cudaStream_t stream) const;
  // h [S, inner] (keep_h: it is needed later) and, but for fp8, a [S, F] = weight * act(h). bias [L, inner] f32, or null.
  void first(const ExpertSet& set, const ListedRows& x, const TensorView& h, bool keep_h, const TensorView& a, const TensorView& weight, const TensorView& bias,
             cudaStream_t stream) const;
  // y [S, W] (+)= (weight * act(h)) W2^T. fp8 reads h, and writes a where the set keeps it; the others read a.
  void second(const ExpertSet& set, const TensorView& h, const TensorView& weight, const TensorView& a, const TensorView& y, bool accumulate,
              cudaStream_t stream) const;
  // Whether codes along the slots and their scales fit the memory of a: ExpertSet::keeps_a may be set.
  bool fits_a(const ExpertSet& set) const;
  // Whether the matmuls read h where others read a.
  bool reads_h() const { return is_fp8(); }
  // fp8: operands along the slots that second_gradients() (the activation, unless the set keeps it) and first_weight_gradients() (x) then find. They may be
  // made on another stream, beside what brings dy. The others' are made there.
  void quantize_a(const ExpertSet& set, const TensorView& h, const TensorView& weight, cudaStream_t stream) const;
  void quantize_x(const ExpertSet& set, const ListedRows& x, cudaStream_t stream) const;
  // d_w2; h becomes its gradient, or that is quantised where the calls below find it; a is used up; d_weight [S] where given.
  void second_gradients(const ExpertSet& set, const ListedRows& dy, const TensorView& a, const TensorView& h, const TensorView& weight,
                        const TensorView& d_weight, const TensorView& d_w2, bool accumulate, cudaStream_t stream) const;
  // In this order: quantize_dh(), then the other two in either. fp8: of those, row_gradients() second where d_rows is the memory of x_turned.
  void quantize_dh(const ExpertSet& set, const TensorView& dh, cudaStream_t stream) const;
  // d_w1.
  void first_weight_gradients(const ExpertSet& set, const ListedRows& x, const TensorView& dh, const TensorView& d_w1, bool accumulate,
                              cudaStream_t stream) const;
  // d_rows [S, W] (+)= dh W1.
  void row_gradients(const ExpertSet& set, const TensorView& dh, const TensorView& d_rows, bool accumulate, cudaStream_t stream) const;

  // Called before work is queued: a matmul, or the quantising and the activation around it.
  std::function<void(bool is_product, cudaStream_t stream)> on_part;

 private:
  enum class Side { kLeft, kRight, kX };
  bool fuses_gradient(const ExpertSet& set) const;
  void quantize_gradient(const ExpertSet& set, const TensorView& da, const TensorView& h, const TensorView& weight, const TensorView& d_weight,
                         cudaStream_t stream) const;
  QuantizedOperand activation_operand(const ExpertSet& set, const TensorView& a) const;  // along the slots
  bool is_fp8() const { return config_.recipe.kind == Recipe::kFP8; }
  void part(const ExpertSet& set, bool is_product, cudaStream_t stream) const;
  QuantConfig format(Operand operand, Contraction contraction) const { return operand_format(config_.recipe, operand, contraction); }
  QuantizedOperand rows_operand(const ExpertSet& set, Operand operand, std::int64_t C) const;
  QuantizedOperand turned_operand(const ExpertSet& set, Operand operand, std::int64_t C, Side side) const;
  QuantizedOperand weight_operand(const ExpertSet& set, RecipeWeight which, std::int64_t N, std::int64_t C) const;
  QuantizedOperand quantize_rows(const ExpertSet& set, const ListedRows& x, Operand operand, cudaStream_t stream) const;
  void quantize_turned(const ExpertSet& set, const ListedRows& x, Operand operand, Side side, cudaStream_t stream) const;
  void wgrad(const ExpertSet& set, const QuantizedOperand& a, const QuantizedOperand& dy, const TensorView& d_weights, bool accumulate,
             cudaStream_t stream) const;
  // Others: the operand as bf16 in `side`, slots in order.
  TensorView widened(const ExpertSet& set, const ListedRows& x, Operand operand, Contraction contraction, std::uint64_t draws, Side side,
                     cudaStream_t stream) const;
  TensorView wide_weights(const ExpertSet& set, RecipeWeight which, std::int64_t N, std::int64_t C, Contraction contraction) const;
  TensorView wide_offsets(const ExpertSet& set) const;  // of operands along slots
  bool fills_groups() const { return config_.recipe.kind == Recipe::kNVFP4 && config_.recipe.hadamard; }

  MoeConfig config_;
  RecipeLayout layout_;
  std::int64_t L_;
};

}  // namespace waybill::cuda
