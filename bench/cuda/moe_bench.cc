// SPDX-License-Identifier: Apache-2.0
// The matched module benchmark: one MoE layer, forward and backward in bf16, by several designs on the same GPUs, parameters, rows and routes. Every stack's
// results are compared before it is timed; one that differs is not timed, and the exit code is 1. Prints a table, writes records as JSON lines.
//   bench_cuda_moe OUT.jsonl [--shape NAME,...] [--stack NAME,...] [--recipe NAME,...] [--load natural|W0..W9|recorded:RUN/routes/STEP/LAYER,...] [--ablation]
//   [--f32] [--wgrad-control]
//   [--iterations N] [--most-seconds S] [--eager NAME,...] [--ranks P] [--factor F] [--combine-sms N,...] [--column-blocks N,...]
//                  [--shapes FILE] [--trace FILE]     --help explains them
//     --stack     of sparse, beside, exact, exact-resend, exact-blocks, dense-map, padded, capacity, loop (all by default); --ablation: also the steps from
//     dense-map to sparse.
//                 exact: the sparse layer in eager mode at exact sizes (one host wait), in blocks of columns by policy; exact-resend: the same, rows of x are
//                 sent again in backward; exact-blocks: and what has a row a slot and the width of a row is made in --column-blocks blocks of columns (2)
//                 beside: the combine of dx beside the gradient of the first weights, on the SMs of --combine-sms (32 by default)
//     --recipe    also the sparse stack under fp8, mxfp8 or nvfp4: weights quantised in every step, and once. Compared with bf16 to the recipe's bound
//     --f32       also the sparse stack with weight gradients added to in f32
//     --wgrad-control  also dW1 and dW2 by themselves, beside the same kernel with slices that add to the result in the order in which they come
//     --iterations  160 steps a row by default (loop: an eighth); --most-seconds: designs other than sparse and dense-map take at most so many seconds of steps
//     --eager     all by default: designs that can be captured are timed eager, too. Those with a host wait always are
//     --ranks     2 by default: one on each of two GPUs, or virtual ranks of one
//     --factor    receive_factor of sparse and dense-map, 1.25 by default; loads other than natural get what their hottest rank needs, and 5%
//     --trace     phases of one step of the sparse stack as a Chrome trace (Perfetto), and captured steps beside the host calls that queued them
// Times: eager, with a host thread a GPU (host work is in them), and as replays of one graph where a stack has no host wait; behind a barrier of the GPUs,
// the slower GPU's; the median of the steps. Phases: events between the phases of eager steps in which the host has queued ahead, of each stream. Exchange that
// is not hidden: time in which plan, dispatch or combine run on a GPU and no other phase does, over the step's.
#include <cstdlib>

#include "bench/cuda/moe/module_bench.h"
#include "bench/cuda/run_main.h"

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "LAZY", 1);  // as exchange/cuda/device_exchange.h says of a thread a GPU
  return waybill::cuda::run_main("bench_cuda_moe", waybill::cuda::moe_bench::run_module_bench, argc, argv);
}
