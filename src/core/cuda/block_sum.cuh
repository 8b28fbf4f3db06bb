// SPDX-License-Identifier: Apache-2.0
// Reductions over a warp and a CTA in a fixed order; every thread gets the result.
#pragma once

#include "core/cuda/ptx.cuh"

namespace waybill::cuda {

template <class T>
__device__ __forceinline__ T warp_sum(T v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(ptx::kFullWarp, v, step);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(ptx::kFullWarp, v, step));
  return v;
}

// room: one value a warp. Barriers on both sides: the room may be used again at once.
template <int kThreads, class T>
__device__ __forceinline__ T block_sum(T v, T* room) {
  const T own = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = own;
  __syncthreads();
  T total = room[0];
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) total += room[w];
  return total;
}
template <int kThreads>
__device__ __forceinline__ float block_max(float v, float* room) {
  const float own = warp_max(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = own;
  __syncthreads();
  float top = room[0];
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) top = fmaxf(top, room[w]);
  return top;
}

}  // namespace waybill::cuda
