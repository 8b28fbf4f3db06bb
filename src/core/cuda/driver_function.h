// SPDX-License-Identifier: Apache-2.0
// The driver's functions, found through the runtime, so that nothing links to libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <string>

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

// The driver's name and sentence of an error, as "CUDA_ERROR_INVALID_VALUE (invalid argument)".
inline std::string driver_error_text(CUresult error) {
  const auto ask = [&](const char* function, const char* otherwise) {
    const char* text = nullptr;
    const auto known = driver_function<CUresult(CUresult, const char**)>(function, 6000)(error, &text);
    return std::string(known == CUDA_SUCCESS && text != nullptr ? text : otherwise);
  };
  return fmt::format("{} ({})", ask("cuGetErrorName", "unknown error"), ask("cuGetErrorString", "no text"));
}

}  // namespace waybill::cuda
