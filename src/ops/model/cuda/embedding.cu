// SPDX-License-Identifier: Apache-2.0
// Forward: a CTA a token, bytes: a row read, a row written. Backward: a CTA a token; the CTA of a token's first position adds all rows of that token in
// order, the others find an earlier position and end. T * T / 2 comparisons of ids from L2, independent of the vocabulary.
#include "ops/model/cuda/model_kernels.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) embedding_forward(const float* table, const std::int32_t* tokens, std::int64_t H, float* y) {
  const std::int64_t t = blockIdx.x, token = tokens[t];
  for (std::int64_t i = threadIdx.x; i < H; i += kThreads) y[t * H + i] = token < 0 ? 0.0f : table[token * H + i];
}

// Positions of [first, first + kThreads) that hold `token`, ascending, in `list`; their number.
__device__ int find_positions(const std::int32_t* tokens, std::int64_t T, std::int64_t first, std::int32_t token, int* list, int* warp_counts) {
  const std::int64_t t = first + threadIdx.x;
  const unsigned mask = __ballot_sync(0xffffffffu, t < T && tokens[t] == token);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  __syncthreads();  // the list of the call before has been read
  if (lane == 0) warp_counts[warp] = __popc(mask);
  __syncthreads();
  int before = 0, total = 0;
  for (int w = 0; w < kThreads / 32; ++w) before += w < warp ? warp_counts[w] : 0, total += warp_counts[w];
  if ((mask >> lane & 1u) != 0) list[before + __popc(mask & ((1u << lane) - 1u))] = static_cast<int>(threadIdx.x);
  __syncthreads();
  return total;
}

__global__ void __launch_bounds__(kThreads) embedding_backward(const std::int32_t* tokens, const float* dy, std::int64_t T, std::int64_t H, float* d_table) {
  __shared__ int list[kThreads], warp_counts[kThreads / 32];
  const std::int64_t own = blockIdx.x;
  const std::int32_t token = tokens[own];
  if (token < 0) return;
  for (std::int64_t first = 0; first < own; first += kThreads) {
    const std::int64_t t = first + threadIdx.x;
    if (__syncthreads_or(t < own && tokens[t] == token) != 0) return;
  }
  float* row = d_table + token * H;
  for (std::int64_t first = own; first < T; first += kThreads) {
    const int count = find_positions(tokens, T, first, token, list, warp_counts);
    if (count == 0) continue;
    for (std::int64_t i = threadIdx.x; i < H; i += kThreads) {
      float sum = row[i];
      for (int n = 0; n < count; ++n) sum += dy[(first + list[n]) * H + i];
      row[i] = sum;
    }
  }
}

}  // namespace

void launch_embedding_forward(const float* table, const std::int32_t* tokens, std::int64_t T, std::int64_t H, float* y, cudaStream_t stream) {
  if (T > 0) embedding_forward<<<static_cast<unsigned>(T), kThreads, 0, stream>>>(table, tokens, H, y);
}

void launch_embedding_backward(const std::int32_t* tokens, const float* dy, std::int64_t T, std::int64_t H, float* d_table, cudaStream_t stream) {
  if (T > 0) embedding_backward<<<static_cast<unsigned>(T), kThreads, 0, stream>>>(tokens, dy, T, H, d_table);
}

}  // namespace waybill::cuda
