// SPDX-License-Identifier: Apache-2.0
// Addresses of all ranks' arenas as this GPU sees them. One CTA, a thread a rank.
#include <nccl_device.h>

#include "fabric/nccl/nccl_pointers.h"

namespace waybill::cuda {
namespace {

__global__ void nccl_window_pointers(ncclWindow_t window, int num_ranks, void** table) {
  for (int rank = static_cast<int>(threadIdx.x); rank < num_ranks; rank += static_cast<int>(blockDim.x)) table[rank] = ncclGetLsaPointer(window, 0, rank);
}

}  // namespace

void launch_window_pointers(ncclWindow_t window, int num_ranks, void** table, cudaStream_t stream) {
  nccl_window_pointers<<<1, 96, 0, stream>>>(window, num_ranks, table);
}

}  // namespace waybill::cuda
