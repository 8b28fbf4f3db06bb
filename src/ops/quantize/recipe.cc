// SPDX-License-Identifier: Apache-2.0
#include "waybill/recipe.h"

namespace waybill {

const char* to_string(Recipe recipe) {
  static constexpr const char* kNames[] = {"fp32", "bf16", "fp8", "mxfp8", "nvfp4"};
  WB_CHECK(static_cast<int>(recipe) <= 4, "unknown recipe {}", static_cast<int>(recipe));
  return kNames[static_cast<int>(recipe)];
}

void validate(const RecipeConfig& config) {
  WB_CHECK(static_cast<int>(config.kind) <= 4, "recipe: unknown kind {}", static_cast<int>(config.kind));
  WB_CHECK(static_cast<int>(config.scale_rule) <= 1, "recipe: unknown scale rule {}", static_cast<int>(config.scale_rule));
}

QuantConfig operand_format(const RecipeConfig& config, Operand operand, Contraction contraction) {
  validate(config);
  WB_CHECK(config.is_blocked(), "the recipe {} has no blocks", to_string(config.kind));
  QuantConfig format;
  std::int64_t block = 0;
  switch (config.kind) {
    case Recipe::kFP8:
      format = fp8_rows(config.power_of_two_scales ? ScaleFormat::kPowerOfTwo : ScaleFormat::kF32);
      block = 128;
      break;
    case Recipe::kMXFP8:
      format = mxfp8_rows();
      block = 32;
      break;
    default:
      format = nvfp4_rows();
      block = kHadamardRows;
      format.stochastic = config.stochastic_rounding && operand == Operand::kGradient;
      break;
  }
  format.rule = config.scale_rule;
  const bool is_tile = operand == Operand::kWeight && config.kind != Recipe::kMXFP8;
  format.block_rows = is_tile || contraction == Contraction::kRows ? block : 1;
  format.block_columns = is_tile || contraction == Contraction::kColumns ? block : 1;
  return format;
}

void check_recipe_fit(const RecipeConfig& config, const char* dimension, std::int64_t value) {
  if (config.is_blocked()) check_block_fit(operand_format(config, Operand::kActivation, Contraction::kColumns), dimension, value);
}

}  // namespace waybill
