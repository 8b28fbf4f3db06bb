// SPDX-License-Identifier: Apache-2.0
// What experts gave and what did not cross a link, added and rounded once. Bytes: 4 or 8 an element read, 2 or 4 written.
#include "exchange/cuda/row_vectors.cuh"
#include "moe/cuda/sum_rows.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

template <class Out>
__global__ void __launch_bounds__(kThreads) moe_sum_rows(const SumRowsArgs args) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (i >= args.rows * args.H) return;
  const std::int64_t b_end = args.b_rows == nullptr ? args.rows * args.H : *args.b_rows * args.H;
  float sum[8] = {};
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const float4 zero{0.0f, 0.0f, 0.0f, 0.0f};
    const float4 p = args.a != nullptr ? __ldcs(reinterpret_cast<const float4*>(args.a + i) + v) : zero;
    const float4 q = i < b_end ? __ldcs(reinterpret_cast<const float4*>(args.b + i) + v) : zero;
    sum[4 * v] = p.x + q.x, sum[4 * v + 1] = p.y + q.y, sum[4 * v + 2] = p.z + q.z, sum[4 * v + 3] = p.w + q.w;
  }
  store_values<Out>(static_cast<Out*>(args.out) + i, sum);
}

}  // namespace

void launch_sum_rows(const SumRowsArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return;
  const auto ctas = static_cast<unsigned>((args.rows * args.H / 8 + kThreads - 1) / kThreads);
  if (args.out_is_bf16) {
    moe_sum_rows<__nv_bfloat16><<<ctas, kThreads, 0, stream>>>(args);
  } else {
    moe_sum_rows<float><<<ctas, kThreads, 0, stream>>>(args);
  }
}

}  // namespace waybill::cuda
