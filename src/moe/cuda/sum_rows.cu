// SPDX-License-Identifier: Apache-2.0
// The two parts of the layer's input gradient. Bytes: 8 an element read, 2 or 4 written.
#include "exchange/cuda/row_vectors.cuh"
#include "moe/cuda/sum_rows.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

template <class Out>
__global__ void __launch_bounds__(kThreads) moe_sum_rows(const float* a, const float* b, Out* out, std::int64_t count) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (i >= count) return;
  float sum[8];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const float4 p = __ldcs(reinterpret_cast<const float4*>(a + i) + v), q = __ldcs(reinterpret_cast<const float4*>(b + i) + v);
    sum[4 * v] = p.x + q.x, sum[4 * v + 1] = p.y + q.y, sum[4 * v + 2] = p.z + q.z, sum[4 * v + 3] = p.w + q.w;
  }
  store_values<Out>(out + i, sum);
}

}  // namespace

void launch_sum_rows(const SumRowsArgs& args, cudaStream_t stream) {
  if (args.count == 0) return;
  const auto ctas = static_cast<unsigned>((args.count / 8 + kThreads - 1) / kThreads);
  if (args.out_is_bf16) {
    moe_sum_rows<<<ctas, kThreads, 0, stream>>>(args.a, args.b, static_cast<__nv_bfloat16*>(args.out), args.count);
  } else {
    moe_sum_rows<<<ctas, kThreads, 0, stream>>>(args.a, args.b, static_cast<float*>(args.out), args.count);
  }
}

}  // namespace waybill::cuda
