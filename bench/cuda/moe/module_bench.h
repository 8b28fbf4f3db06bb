// SPDX-License-Identifier: Apache-2.0
// The matched module benchmark as a function: of the program bench_cuda_moe and of `waybill bench moe --device cuda`.
#pragma once

namespace waybill::cuda::moe_bench {

// Options as bench/cuda/moe_bench.cc says; argv[0] is passed over. 0: all was measured; 1: something failed or differed (and was printed). Throws on bad
// options. CUDA_MODULE_LOADING=LAZY must be set before CUDA starts (exchange/cuda/device_exchange.h).
int run_module_bench(int argc, char** argv);

}  // namespace waybill::cuda::moe_bench
