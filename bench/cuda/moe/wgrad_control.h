// SPDX-License-Identifier: Apache-2.0
// What the fixed order of sums costs the weight gradients: the library's wgrad beside the same kernel whose slices add to the result as they come.
#pragma once

#include "bench/cuda/moe/problem.h"
#include "bench/cuda/moe/report.h"

namespace waybill::cuda::moe_bench {

// dW1 and dW2 of rank 0's experts with the rows that problem.counts() gives them, stored as bf16 and added to in f32; results are compared first. Waits. Throws
// where they differ.
void run_wgrad_control(const Problem& problem, Report& report);

}  // namespace waybill::cuda::moe_bench
