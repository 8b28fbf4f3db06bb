// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace waybill::cuda {

inline bool has_gpu() {
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  (void)cudaGetLastError();
  return found;
}
// The machine's GPUs, at most `limit` of them.
inline std::vector<int> all_devices(int limit) {
  int count = 0;
  (void)cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  std::vector<int> devices;
  for (int device = 0; device < std::min(count, limit); ++device) devices.push_back(device);
  return devices;
}
#define WB_NEEDS_GPU()              \
  if (::waybill::cuda::has_gpu()) { \
  } else                            \
    GTEST_SKIP() << "needs a GPU"

}  // namespace waybill::cuda
