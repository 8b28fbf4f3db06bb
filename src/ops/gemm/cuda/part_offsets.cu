// SPDX-License-Identifier: Apache-2.0
// One CTA of 256 threads.
#include "ops/gemm/cuda/part_offsets.h"

namespace waybill::cuda {
namespace {

__global__ void part_offsets(const PartOffsets p) {
  for (int i = static_cast<int>(threadIdx.x); i <= p.groups; i += static_cast<int>(blockDim.x)) {
    p.part[i] = min(max(p.offsets[p.first_group + i] - p.row0, 0), p.rows);
    if (p.firsts != nullptr) p.firsts[i] = static_cast<std::int32_t>(i * p.outer);
  }
  if (p.status == nullptr) return;
  for (int g = static_cast<int>(threadIdx.x); g < p.all_groups; g += static_cast<int>(blockDim.x)) {
    const int low = p.offsets[g], high = p.offsets[g + 1];
    if (low < 0 || high < low || high > p.all_rows || (g == 0 && low != 0)) atomicOr(&p.status->flags, static_cast<unsigned>(kStatusBadOffsets));
  }
}

}  // namespace

void launch_part_offsets(const PartOffsets& p, cudaStream_t stream) { part_offsets<<<1, 256, 0, stream>>>(p); }

}  // namespace waybill::cuda
