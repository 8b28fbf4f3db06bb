// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/ptx.cuh"
#include "cuda/gemm_spin.h"

namespace waybill::cuda {
namespace {

__global__ void spin_for(std::uint64_t ns) {
  const std::uint64_t start = ptx::global_timer_ns();
  while (ptx::global_timer_ns() - start < ns) __nanosleep(1000);
}

}  // namespace

void spin(double milliseconds, cudaStream_t stream) { spin_for<<<1, 1, 0, stream>>>(static_cast<std::uint64_t>(milliseconds * 1e6)); }

}  // namespace waybill::cuda
