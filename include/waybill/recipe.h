// SPDX-License-Identifier: Apache-2.0
// Recipes of low-precision training: how the operands of a layer's matmuls are rounded. Weights, gradients, optimizer state, saved
// activations and every accumulation stay fp32; a recipe changes what the three products of an expert matmul multiply.
//
//   recipe   element  activations, gradients           weights          scale
//   fp32     -        as they are                      as they are      -
//   bf16     bf16     rounded to nearest even          likewise         -
//   fp8      E4M3     1 x 128                          128 x 128        power of two or fp32
//   mxfp8    E4M3     1 x 32                           1 x 32           E8M0
//   nvfp4    E2M1     1 x 16                           16 x 16          E4M3 under fp32 per group (= per expert)
//
// A block lies along the contraction of its product. forward and dgrad contract along the columns of rows and gradients; wgrad contracts along
// the slots of an expert: blocks of 128 x 1, 32 x 1 and 16 x 1 that start anew at each expert, the last one short. Both directions come
// from the fp32 source, never from each other. The tiles of fp8 and nvfp4 weights serve both directions; mxfp8 weights have 1 x 32 blocks
// in forward and 32 x 1 in dgrad.
// nvfp4 also rounds gradients stochastically (both directions) and rotates both wgrad operands: 16 slots x become H D x with the
// orthonormal 16 x 16 Hadamard matrix H and random signs D, which leaves the product as it is and spreads outliers (short blocks are
// filled with zeros).
#pragma once

#include <cstdint>

#include "waybill/quantize.h"

namespace waybill {

enum class Recipe : std::uint8_t { kF32 = 0, kBF16 = 1, kFP8 = 2, kMXFP8 = 3, kNVFP4 = 4 };
WB_API const char* to_string(Recipe recipe);  // "fp32", "bf16", "fp8", "mxfp8", "nvfp4"

struct RecipeConfig {
  Recipe kind = Recipe::kF32;
  ScaleRule scale_rule = ScaleRule::kRoundUp;               // mxfp8, and fp8 with powers of two
  bool power_of_two_scales = true;                          // fp8; false: amax / 448 in fp32
  bool stochastic_rounding = true;                          // nvfp4: of gradients
  bool hadamard = true;                                     // nvfp4: of wgrad operands
  bool is_blocked() const { return kind >= Recipe::kFP8; }  // operands are quantised in blocks with scales
};
WB_API void validate(const RecipeConfig& config);

enum class Operand : std::uint8_t { kActivation = 0, kGradient = 1, kWeight = 2 };
enum class Contraction : std::uint8_t { kColumns = 0, kRows = 1 };  // along which dimension of the stored [rows, columns] the product sums

// The blocks of an operand; blocked recipes only. Stochastic where the recipe says so; the seeds are the caller's.
WB_API QuantConfig operand_format(const RecipeConfig& config, Operand operand, Contraction contraction);

// Refuses a width that is contracted and does not fit the recipe's blocks (mxfp8: 32, nvfp4: 16; fp8 takes any width, its last block is
// short); `dimension` is the caller's name for it ("F").
WB_API void check_recipe_fit(const RecipeConfig& config, const char* dimension, std::int64_t value);

}  // namespace waybill
