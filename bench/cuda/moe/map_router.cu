// SPDX-License-Identifier: Apache-2.0
// The router of the dense-map design: a warp a token, the row of logits in shared memory, K passes; results for all E experts.
#include <cfloat>

#include "bench/cuda/moe/map_kernels.h"
#include "core/cuda/ptx.cuh"

namespace waybill::cuda::moe_bench {
namespace {

constexpr int kWarps = 4;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

__device__ __forceinline__ float warp_sum(float v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(ptx::kFullWarp, v, d);
  return v;
}

__global__ void __launch_bounds__(kWarps * 32) map_top_k(const float* __restrict__ logits, int T, int E, int K, std::uint8_t* map, float* probabilities) {
  extern __shared__ float shared[];
  const int lane = static_cast<int>(threadIdx.x) & 31, t = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);
  if (t >= T) return;
  float* row = shared + threadIdx.x / 32 * static_cast<unsigned>(E);
  const std::int64_t at = static_cast<std::int64_t>(t) * E;
  for (int e = lane; e < E; e += 32) {
    row[e] = logits[at + e];
    map[at + e] = 0;
    probabilities[at + e] = 0;
  }
  __syncwarp();
  int mine[4] = {-1, -1, -1, -1};  // choices lane, lane + 32, ...
  float scores[4] = {};
  for (int k = 0; k < K; ++k) {
    float best = -FLT_MAX;
    int expert = 0x7fffffff;
    for (int e = lane; e < E; e += 32) {
      if (row[e] > best) best = row[e], expert = e;
    }
    for (int d = 16; d > 0; d /= 2) {
      const float other = __shfl_xor_sync(ptx::kFullWarp, best, d);
      const int other_expert = __shfl_xor_sync(ptx::kFullWarp, expert, d);
      if (other > best || (other == best && other_expert < expert)) best = other, expert = other_expert;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (k == lane + 32 * i) mine[i] = expert, scores[i] = sigmoid(best);
    }
    if (expert % 32 == lane) row[expert] = -FLT_MAX;
    __syncwarp();
  }
  const float sum = warp_sum(scores[0] + scores[1] + scores[2] + scores[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (mine[i] >= 0) map[at + mine[i]] = 1, probabilities[at + mine[i]] = scores[i] / sum;
  }
}

__global__ void __launch_bounds__(kWarps * 32)
    map_router_backward(const float* __restrict__ logits, const std::uint8_t* __restrict__ map, const float* __restrict__ probabilities,
                        const float* __restrict__ d_probabilities, int T, int E, float* d_logits) {
  const int lane = static_cast<int>(threadIdx.x) & 31, t = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);
  if (t >= T) return;
  const std::int64_t at = static_cast<std::int64_t>(t) * E;
  float sum = 0, dot = 0;
  for (int e = lane; e < E; e += 32) {
    if (map[at + e] == 0) continue;
    sum += sigmoid(logits[at + e]);
    dot += d_probabilities[at + e] * probabilities[at + e];
  }
  sum = warp_sum(sum), dot = warp_sum(dot);
  for (int e = lane; e < E; e += 32) {
    float d = 0;
    if (map[at + e] != 0) {
      const float s = sigmoid(logits[at + e]);
      d = (d_probabilities[at + e] - dot) / sum * s * (1.0f - s);
    }
    d_logits[at + e] = d;
  }
}

__global__ void map_scatter(const std::int16_t* __restrict__ ids, const float* __restrict__ weights, std::int64_t routes, int E, int K, std::uint8_t* map,
                            float* probabilities) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= routes || ids[i] < 0) return;
  const std::int64_t at = i / K * E + ids[i];
  if (map != nullptr) map[at] = 1;
  if (probabilities != nullptr) probabilities[at] = weights[i];
}

__global__ void map_gather(const std::int16_t* __restrict__ ids, const float* __restrict__ probabilities, std::int64_t routes, int E, int K, float* weights) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < routes) weights[i] = ids[i] < 0 ? 0.0f : probabilities[i / K * E + ids[i]];
}

unsigned blocks(std::int64_t items, int each) { return static_cast<unsigned>((items + each - 1) / each); }

}  // namespace

void launch_map_top_k(const float* logits, int T, int E, int K, std::uint8_t* map, float* probabilities, cudaStream_t stream) {
  const std::size_t bytes = static_cast<std::size_t>(kWarps * E) * 4;
  if (bytes > 48 * 1024) (void)cudaFuncSetAttribute(map_top_k, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (T > 0) map_top_k<<<blocks(T, kWarps), kWarps * 32, bytes, stream>>>(logits, T, E, K, map, probabilities);
}

void launch_map_router_backward(const float* logits, const std::uint8_t* map, const float* probabilities, const float* d_probabilities, int T, int E,
                                float* d_logits, cudaStream_t stream) {
  if (T > 0) map_router_backward<<<blocks(T, kWarps), kWarps * 32, 0, stream>>>(logits, map, probabilities, d_probabilities, T, E, d_logits);
}

void launch_map_scatter(const std::int16_t* ids, const float* weights, std::int64_t routes, int E, int K, std::uint8_t* map, float* probabilities,
                        cudaStream_t stream) {
  if (routes > 0) map_scatter<<<blocks(routes, 256), 256, 0, stream>>>(ids, weights, routes, E, K, map, probabilities);
}

void launch_map_gather(const std::int16_t* ids, const float* probabilities, std::int64_t routes, int E, int K, float* weights, cudaStream_t stream) {
  if (routes > 0) map_gather<<<blocks(routes, 256), 256, 0, stream>>>(ids, probabilities, routes, E, K, weights);
}

}  // namespace waybill::cuda::moe_bench
