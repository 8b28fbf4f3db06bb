// SPDX-License-Identifier: Apache-2.0
// WB_TRY_CUDA: a failed CUDA call becomes waybill::Error{kCuda} with the call's text and the runtime's name for the error.
#pragma once

#include <cuda_runtime_api.h>

#include "waybill/error.h"

namespace waybill::cuda {

[[noreturn]] void throw_cuda_error(cudaError_t error, const char* call, const char* file, int line);

// After a launch: reports bad configurations at once; faults inside the kernel surface at the next synchronising call.
void check_launch(const char* kernel);

}  // namespace waybill::cuda

#define WB_TRY_CUDA(call)                                                          \
  do {                                                                             \
    const cudaError_t wb_cuda_error = (call);                                      \
    if (wb_cuda_error != cudaSuccess) [[unlikely]]                                 \
      ::waybill::cuda::throw_cuda_error(wb_cuda_error, #call, __FILE__, __LINE__); \
  } while (0)

// For destructors: keeps the first error out of the next call's way and never throws.
#define WB_TRY_CUDA_NOEXCEPT(call)                       \
  do {                                                   \
    if ((call) != cudaSuccess) (void)cudaGetLastError(); \
  } while (0)
