// SPDX-License-Identifier: Apache-2.0
// A result that was summed in f32. Bytes: 4 an element read, 2 or 4 written.
#include "exchange/cuda/row_vectors.cuh"
#include "moe/cuda/round_rows.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

template <class Out>
__global__ void __launch_bounds__(kThreads) moe_round_rows(const float* from, Out* out, std::int64_t count) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (i >= count) return;
  float values[8];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const float4 four = __ldcs(reinterpret_cast<const float4*>(from + i) + v);
    values[4 * v] = four.x, values[4 * v + 1] = four.y, values[4 * v + 2] = four.z, values[4 * v + 3] = four.w;
  }
  store_values<Out>(out + i, values);
}

}  // namespace

void launch_round_rows(const float* from, void* out, std::int64_t count, bool out_is_bf16, cudaStream_t stream) {
  if (count == 0) return;
  const auto ctas = static_cast<unsigned>((count / 8 + kThreads - 1) / kThreads);
  if (out_is_bf16) {
    moe_round_rows<<<ctas, kThreads, 0, stream>>>(from, static_cast<__nv_bfloat16*>(out), count);
  } else {
    moe_round_rows<<<ctas, kThreads, 0, stream>>>(from, static_cast<float*>(out), count);
  }
}

}  // namespace waybill::cuda
