// SPDX-License-Identifier: Apache-2.0
// The driver's functions, found through the runtime, so that nothing links to libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "core/cuda/cuda_error.h"

namespace waybill::cuda {

// version: the CUDA version that brought it, as 1000 * major + 10 * minor. Throws kUnsupported, by name, where the driver is older.
template <class Function>
Function* driver_function(const char* name, unsigned int version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  WB_TRY_CUDA(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || found == nullptr) WB_FAIL(ErrorCode::kUnsupported, "the driver has no {}", name);
  return reinterpret_cast<Function*>(found);
}

}  // namespace waybill::cuda
