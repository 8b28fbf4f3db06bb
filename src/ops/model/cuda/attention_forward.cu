// SPDX-License-Identifier: Apache-2.0
// Causal attention, fp32 on CUDA cores. Grid: (query tiles, heads, sequences); a CTA walks over the key tiles up to its own with a running maximum and sum.
// Scores never leave registers. Bytes: q, o once; k, v once a query tile (from L2).
#include "ops/model/cuda/attention_tile.cuh"

namespace waybill::cuda {
namespace {

using namespace attention;

template <int kColumns>
__global__ void __launch_bounds__(kThreads) attention_forward(const AttentionCall c) {
  extern __shared__ float shared[];
  float *q = shared, *k = q + tile_floats(c.D), *v = k + tile_floats(c.D);
  const std::int64_t h = blockIdx.y, b = blockIdx.z, kv = h / (c.num_heads / c.num_kv_heads), first = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const HeadRows keys = head_rows(c.k, c, c.num_kv_heads, b, kv), values = head_rows(c.v, c, c.num_kv_heads, b, kv);
  load_tile(q, head_rows(c.q, c, c.num_heads, b, h), first, c.D);
  const float scale = 1.0f / sqrtf(static_cast<float>(c.D));
  const std::int64_t row = first + threadIdx.x / 32 * kRows, lane = threadIdx.x % 32;
  float sum[kRows][kColumns] = {}, top[kRows], total[kRows], p[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) top[r] = -INFINITY, total[r] = 0.0f;
  for (std::int64_t begin = 0; begin <= first; begin += kTile) {
    __syncthreads();
    load_tile(k, keys, begin, c.D);
    load_tile(v, values, begin, c.D);
    __syncthreads();
    dots(p, q, k, c.D);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float score = begin + lane <= row + r ? p[r] * scale : -INFINITY;
      const float higher = fmaxf(top[r], warp_max(score)), shrink = expf(top[r] - higher);
      p[r] = expf(score - higher);
      total[r] = total[r] * shrink + warp_sum(p[r]);
      top[r] = higher;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sum[r][j] *= shrink;
    }
    add_weighted(sum, p, v, c.D);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (lane == 0 && row + r < c.seq_len && c.lse != nullptr) c.lse[(b * c.num_heads + h) * c.seq_len + row + r] = top[r] + logf(total[r]);
    total[r] = 1.0f / total[r];
  }
  store_rows(c.o + head_offset(c, c.num_heads, b, h), c.num_heads * c.D, row, c.seq_len, sum, total, c.D);
}

}  // namespace

void launch_attention_forward(const AttentionCall& c, cudaStream_t stream) {
  if (c.B * c.seq_len == 0) return;
  const dim3 grid(static_cast<unsigned>((c.seq_len + kTile - 1) / kTile), static_cast<unsigned>(c.num_heads), static_cast<unsigned>(c.B));
  dispatch_columns(c.D, [&]<int kColumns>() { launch_tiles(attention_forward<kColumns>, grid, 3, c, stream); });
}

}  // namespace waybill::cuda
