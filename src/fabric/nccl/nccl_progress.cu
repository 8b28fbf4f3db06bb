// SPDX-License-Identifier: Apache-2.0
// One more call of the rail that the device has come to, or is through with: a count in host memory, which a thread reads that waits for nothing of the
// device's. Behind messages it also takes the host's word that the group is given up to where kernels look for it, before any of them can take what was cut
// off for what has come. One thread; a kernel, not a memory operation of the stream, because replays of a graph must count as well.
#include "core/cuda/ptx.cuh"
#include "fabric/nccl/nccl_progress.h"

namespace waybill::cuda {
namespace {

__global__ void nccl_progress(std::uint32_t* count, const std::uint32_t* is_lost, std::uint32_t* poison) {
  atomicAdd(count, 1u);
  if (is_lost != nullptr && ptx::ld_acquire_sys(is_lost) != 0) ptx::st_release_sys(poison, 1u);
}

}  // namespace

void launch_nccl_progress(std::uint32_t* count, cudaStream_t stream, const std::uint32_t* is_lost, std::uint32_t* poison) {
  nccl_progress<<<1, 1, 0, stream>>>(count, is_lost, poison);
}

}  // namespace waybill::cuda
