// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device_random.h"

namespace waybill::cuda {
namespace {

__device__ std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

template <class T>
__global__ void fill(T* data, std::size_t count, std::uint64_t seed, float scale) {
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    const std::uint64_t bits = mix(seed ^ mix(i));
    const float u = (static_cast<float>(bits >> 40) + 0.5f) * 5.9604645e-8f, v = static_cast<float>((bits >> 8) & 0xffffffu) * 5.9604645e-8f;
    data[i] = static_cast<T>(scale * sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v));
  }
}

}  // namespace

void fill_normal(void* data, DType dtype, std::size_t count, std::uint64_t seed, float scale, cudaStream_t stream) {
  if (count == 0) return;
  if (dtype == DType::kF32) fill<<<2048, 256, 0, stream>>>(static_cast<float*>(data), count, seed, scale);
  if (dtype == DType::kBF16) fill<<<2048, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(data), count, seed, scale);
  if (dtype == DType::kF16) fill<<<2048, 256, 0, stream>>>(static_cast<__half*>(data), count, seed, scale);
}

}  // namespace waybill::cuda
