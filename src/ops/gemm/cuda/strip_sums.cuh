// SPDX-License-Identifier: Apache-2.0
// Column sums in strips: a CTA of 32 x kStripLines threads, eight columns a thread, a line every kStripLines-th row; the lines' sums are added in their order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace waybill::cuda {

inline constexpr int kStripLines = 16, kStripColumns = 8, kStripWidth = 32 * kStripColumns;

// `sum` of every thread of a strip whose first column is `first`, of n columns together, to out [n] (added, or stored). part: shared. All threads of the CTA.
__device__ __forceinline__ void add_up_lines(const float (&sum)[kStripColumns], float (&part)[kStripLines][kStripWidth], std::int64_t first, std::int64_t n,
                                             float* out, bool accumulate) {
  const int lane = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  const std::int64_t column = first + kStripColumns * lane;
  // Planes of 32 lanes: neighbours in a plane lie in neighbouring banks.
#pragma unroll
  for (int i = 0; i < kStripColumns; ++i) part[line][i * 32 + lane] = sum[i];
  __syncthreads();
  if (line >= kStripColumns || column >= n) return;  // line i adds up column i of each lane
  float all = part[0][line * 32 + lane];
  for (int l = 1; l < kStripLines; ++l) all += part[l][line * 32 + lane];
  float& to = out[column + line];
  to = accumulate ? to + all : all;
}

}  // namespace waybill::cuda
