// SPDX-License-Identifier: Apache-2.0
// The router's gate matmul on the GPU by cuBLASLt: logits = x W^T with fp32 accumulation and fp32 logits at every T, and its backward.
//
// x [T, H] and W [E, H] are both bf16 or both fp32 (fp32 runs in full precision, no TF32). d_logits [T, E] is fp32; with bf16 operands
// it is split into two bf16 terms (hi + lo, 16 bits of mantissa), so that no gradient is rounded to 8 bits: matmuls of twice the width.
// cuBLASLt is loaded at the first call (libcublasLt.so.13); kUnsupported naming what was tried when it is not there. All calls queue
// on the stream and are graph capturable once a call of the same shape has run (plans and workspace are made then). Deterministic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "waybill/dtype.h"

namespace waybill::cuda {

struct GateShape {
  std::int64_t T = 0, H = 0, E = 0;
  DType dtype = DType::kBF16;  // of x and W
};

// x, weight, logits: contiguous device memory, 16-byte aligned.
void gate_forward(const GateShape& shape, const void* x, const void* weight, float* logits, int device, cudaStream_t stream);

// d_x [T, H] (fp32, or bf16 with bf16 operands: d_x_dtype) and d_weight [E, H] fp32, each optional; d_weight is added to when accumulate.
void gate_backward(const GateShape& shape, const void* x, const void* weight, const float* d_logits, void* d_x, float* d_weight, bool accumulate, int device,
                   cudaStream_t stream, DType d_x_dtype = DType::kF32);

}  // namespace waybill::cuda
