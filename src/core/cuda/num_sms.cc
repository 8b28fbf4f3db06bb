// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/num_sms.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

#include "core/cuda/cuda_error.h"

namespace waybill::cuda {

int num_sms(int device) {
  static std::array<std::atomic<int>, 64> known{};
  const auto index = static_cast<std::size_t>(device);
  const int seen = index < known.size() ? known[index].load(std::memory_order_relaxed) : 0;
  if (seen > 0) return seen;
  int count = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (index < known.size()) known[index].store(count, std::memory_order_relaxed);
  return count;
}

int num_sms() {
  int device = 0;
  WB_TRY_CUDA(cudaGetDevice(&device));
  return num_sms(device);
}

int num_sms_or(int otherwise) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return num_sms(0);
  (void)cudaGetLastError();
  return otherwise;
}

}  // namespace waybill::cuda
