// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/cuda_error.h"

#include <cstring>

namespace waybill::cuda {

void throw_cuda_error(cudaError_t error, const char* call, const char* file, int line) {
  (void)cudaGetLastError();  // clears errors that are not sticky
  const char* name = std::strrchr(file, '/');
  const ErrorCode code = error == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kCuda;
  WB_FAIL(code, "{} failed: {} ({}) at {}:{}", call, cudaGetErrorName(error), cudaGetErrorString(error), name == nullptr ? file : name + 1, line);
}

void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) WB_FAIL(ErrorCode::kCuda, "launch of {} failed: {} ({})", kernel, cudaGetErrorName(error), cudaGetErrorString(error));
}

}  // namespace waybill::cuda
