// SPDX-License-Identifier: Apache-2.0
// Grids of the quantisers' persistent kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace waybill::cuda {

// Of the current device, which is the one that is launched on.
inline int num_sms() {
  int device = 0, count = 1;
  (void)cudaGetDevice(&device), (void)cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return std::max(count, 1);
}

// CTAs of a persistent grid for `units` pieces of work.
inline unsigned persistent_ctas(std::int64_t units, int ctas_per_sm) {
  return static_cast<unsigned>(std::clamp<std::int64_t>(units, 1, static_cast<std::int64_t>(num_sms()) * ctas_per_sm));
}

}  // namespace waybill::cuda
