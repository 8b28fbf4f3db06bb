// SPDX-License-Identifier: Apache-2.0
// waybill bench moe --device cuda: the module benchmark of bench/cuda/moe and the PyTorch layer beside it.
#pragma once

#include <string>
#include <vector>

#include "bench_problem.h"

namespace waybill::cli {

struct GpuMoeBench {
  std::vector<std::string> shapes, loads, stacks, recipes;  // empty: the benchmark's own; recipes: bf16 alone
  std::string column_blocks, eager, trace, plot, python = "python3";
  double receive_factor = 1.25, seconds = 0;  // seconds: of a row, for designs other than sparse and dense-map; 0: no bound
  bool no_ablation = false, f32_gradients = false, wgrad_control = false, no_peer = false;
};

// The benchmark where this build has it (built with CUDA and WAYBILL_BUILD_BENCH); set by main().
using GpuMoeBenchFunction = int (*)(int argc, char** argv);
void set_gpu_moe_bench(GpuMoeBenchFunction function);

// Runs both, prints their tables and what one is over the other, writes --json. Its exit code: 1 where a stack failed or differed. kUnsupported where this
// build has no such benchmark.
int bench_moe_on_gpu(const BenchOptions& common, const GpuMoeBench& options);

}  // namespace waybill::cli
