// SPDX-License-Identifier: Apache-2.0
// Options of the module benchmark (bench/cuda/moe_bench.cc says what they are for).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "waybill/recipe.h"

namespace waybill::cuda::moe_bench {

struct Options {
  std::string path = "moe.jsonl", shapes_file = "bench/shapes/moe.toml", trace;
  std::vector<std::string> shapes{"deepseek-v3-slice", "qwen3-30b-a3b", "sparser-ep72", "proxy-512", "sparser-2304"};
  std::vector<std::string> stacks = all_stacks();
  std::vector<std::string> eager{"all"};  // designs with an eager row beside their captured one
  std::vector<std::string> loads{"natural"};
  std::vector<Recipe> recipes;
  bool ablation = false, f32 = false, wgrad_control = false;
  int iterations = 160, ranks = 2;
  double seconds = 0;  // --most-seconds: of measured steps a row, for designs other than sparse and dense-map; 0: no bound
  std::vector<int> combine_sms{32}, column_blocks{2};
  double factor = 1.25;

  static std::vector<std::string> all_stacks();
  bool has_eager_row(const std::string& label) const;
};

// argv[0] is passed over. Nothing: --help was printed. Throws kInvalidArgument naming the option, its value and what is allowed.
std::optional<Options> parse_options(int argc, char** argv);

}  // namespace waybill::cuda::moe_bench
