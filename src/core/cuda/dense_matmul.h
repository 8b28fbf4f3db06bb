// SPDX-License-Identifier: Apache-2.0
// Dense matmuls on the GPU by cuBLASLt, for what is not a grouped matmul: projections, gates, output layers.
//
// cuBLASLt is loaded at the first call (libcublasLt.so.13); kUnsupported naming what was tried when it is not there. Calls queue on the stream and
// can be captured once a call of the same shape has run on it (plans and a workspace are made then, which is the start of the stream's work room). fp32
// accumulation, no TF32; deterministic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "waybill/dtype.h"

namespace waybill::cuda {

// c [M, N] = (or +=) a b, all row-major and contiguous, 16-byte aligned. a is stored [M, C], or [C, M] when transpose_a; b [C, N], or [N, C] when
// transpose_b.
struct DenseMatmul {
  std::int64_t M = 0, N = 0, C = 0;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  DType dtype = DType::kBF16;  // of a and b: bf16 or f32
  DType out = DType::kF32;     // of c: f32, or bf16 (bf16 operands)
};
inline constexpr std::size_t kDenseWorkspaceBytes = std::size_t{32} << 20;
void dense_matmul(const DenseMatmul& matmul, const void* a, const void* b, void* c, int device, cudaStream_t stream);

// Loads the library and its kernels onto the device and waits for it; once a device. Where several GPUs of a process wait for each other's kernels this must
// come before: the load allocates memory that the peers see, and so waits for what they run.
void prepare_dense_matmul(int device);

}  // namespace waybill::cuda
