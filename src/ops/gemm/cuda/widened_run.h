// SPDX-License-Identifier: Apache-2.0
// Host side of products that turn their coded operands into bf16 beside themselves (widened_sm90.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "ops/gemm/cuda/widened_params.h"
#include "waybill/quantize.h"

namespace waybill::cuda {

// D [rows, n] = rows [rows, k] times weights [groups, n, k], bf16; MXFP8 (E4M3) or NVFP4 with blocks along k in both operands.
struct WidenedProblem {
  std::int64_t groups, rows, n, k;
  QuantConfig row_config, weight_config;
  QuantizedView coded_rows, coded_weights;
  const std::int32_t* offsets;
  const float* bias;  // [groups, n] or null
  void* d;
  StatusWord* status;
  void* wide;  // room for both rings
  std::int64_t wide_elements;
  std::int32_t* room;  // widened_room().words
};

struct WidenedTuning {
  int piece_elements = 16384;  // of a piece, about
  int opening_blocks = 17;     // made before the product begins
  int band = kWidenedBand;
};

// Why the kernel cannot take the problem; empty = it can.
std::string refuse_widened(const WidenedProblem& problem, int device);
// Queues the setup and the product. Nothing waits.
void run_widened(const WidenedProblem& problem, const WidenedTuning& tuning, int device, cudaStream_t stream);

}  // namespace waybill::cuda
