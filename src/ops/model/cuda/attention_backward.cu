// SPDX-License-Identifier: Apache-2.0
// Backward of causal attention, fp32 on CUDA cores: delta = <d_o, o>, a warp a row; dq, a CTA 32 queries; dk and dv, a CTA 32 keys, which adds the query heads
// of its group and their query tiles in order. Probabilities are computed again from lse. No atomics.
#include "ops/model/cuda/attention_tile.cuh"

namespace waybill::cuda {
namespace {

using namespace attention;

__global__ void __launch_bounds__(kThreads) attention_delta(const AttentionCall c) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;  // (t, head)
  if (row >= c.B * c.seq_len * c.num_heads) return;
  float dot = 0.0f;
  for (int d = static_cast<int>(threadIdx.x) % 32; d < c.D; d += 32) dot = fmaf(c.d_o[row * c.D + d], c.o[row * c.D + d], dot);
  dot = warp_sum(dot);
  const std::int64_t t = row / c.num_heads, h = row % c.num_heads, b = t / c.seq_len;
  if (threadIdx.x % 32 == 0) c.delta[(b * c.num_heads + h) * c.seq_len + t % c.seq_len] = dot;
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads) attention_backward_q(const AttentionCall c) {
  extern __shared__ float shared[];
  float *q = shared, *d_o = q + tile_floats(c.D), *k = d_o + tile_floats(c.D), *v = k + tile_floats(c.D);
  const std::int64_t h = blockIdx.y, b = blockIdx.z, kv = h / (c.num_heads / c.num_kv_heads), first = static_cast<std::int64_t>(blockIdx.x) * kTile;
  const HeadRows keys = head_rows(c.k, c, c.num_kv_heads, b, kv), values = head_rows(c.v, c, c.num_kv_heads, b, kv);
  load_tile(q, head_rows(c.q, c, c.num_heads, b, h), first, c.D);
  load_tile(d_o, head_rows(c.d_o, c, c.num_heads, b, h), first, c.D);
  const float scale = 1.0f / sqrtf(static_cast<float>(c.D));
  const std::int64_t row = first + threadIdx.x / 32 * kRows, lane = threadIdx.x % 32, of_head = (b * c.num_heads + h) * c.seq_len;
  float sum[kRows][kColumns] = {}, lse[kRows], delta[kRows], one[kRows], p[kRows], ds[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    one[r] = 1.0f;
    lse[r] = row + r < c.seq_len ? c.lse[of_head + row + r] : 0.0f, delta[r] = row + r < c.seq_len ? c.delta[of_head + row + r] : 0.0f;
  }
  for (std::int64_t begin = 0; begin <= first; begin += kTile) {
    __syncthreads();
    load_tile(k, keys, begin, c.D);
    load_tile(v, values, begin, c.D);
    __syncthreads();
    dots(p, q, k, c.D);
    dots(ds, d_o, v, c.D);
#pragma unroll
    for (int r = 0; r < kRows; ++r) ds[r] = begin + lane <= row + r ? expf(p[r] * scale - lse[r]) * (ds[r] - delta[r]) * scale : 0.0f;
    add_weighted(sum, ds, k, c.D);
  }
  store_rows(c.dq + head_offset(c, c.num_heads, b, h), c.num_heads * c.D, row, c.seq_len, sum, one, c.D);
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads) attention_backward_kv(const AttentionCall c) {
  extern __shared__ float shared[];
  float *k = shared, *v = k + tile_floats(c.D), *q = v + tile_floats(c.D), *d_o = q + tile_floats(c.D);
  const std::int64_t kv = blockIdx.y, b = blockIdx.z, group = c.num_heads / c.num_kv_heads, first = static_cast<std::int64_t>(blockIdx.x) * kTile;
  load_tile(k, head_rows(c.k, c, c.num_kv_heads, b, kv), first, c.D);
  load_tile(v, head_rows(c.v, c, c.num_kv_heads, b, kv), first, c.D);
  const float scale = 1.0f / sqrtf(static_cast<float>(c.D));
  const std::int64_t row = first + threadIdx.x / 32 * kRows, lane = threadIdx.x % 32;
  float d_key[kRows][kColumns] = {}, d_value[kRows][kColumns] = {}, one[kRows], p[kRows], ds[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) one[r] = 1.0f;
  for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
    const HeadRows queries = head_rows(c.q, c, c.num_heads, b, h), gradients = head_rows(c.d_o, c, c.num_heads, b, h);
    for (std::int64_t begin = first; begin < c.seq_len; begin += kTile) {
      __syncthreads();
      load_tile(q, queries, begin, c.D);
      load_tile(d_o, gradients, begin, c.D);
      __syncthreads();
      const std::int64_t query = begin + lane, at = (b * c.num_heads + h) * c.seq_len + query;
      const bool is_query = query < c.seq_len;
      const float lse = is_query ? c.lse[at] : 0.0f, delta = is_query ? c.delta[at] : 0.0f;
      dots(p, k, q, c.D);
      dots(ds, v, d_o, c.D);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        p[r] = is_query && row + r <= query ? expf(p[r] * scale - lse) : 0.0f;
        ds[r] = p[r] * (ds[r] - delta) * scale;
      }
      add_weighted(d_value, p, d_o, c.D);
      add_weighted(d_key, ds, q, c.D);
    }
  }
  store_rows(c.dk + head_offset(c, c.num_kv_heads, b, kv), c.num_kv_heads * c.D, row, c.seq_len, d_key, one, c.D);
  store_rows(c.dv + head_offset(c, c.num_kv_heads, b, kv), c.num_kv_heads * c.D, row, c.seq_len, d_value, one, c.D);
}

}  // namespace

void launch_attention_backward(const AttentionCall& c, cudaStream_t stream) {
  if (c.B * c.seq_len == 0) return;
  const std::int64_t rows = c.B * c.seq_len * c.num_heads;
  attention_delta<<<static_cast<unsigned>((rows + kThreads / 32 - 1) / (kThreads / 32)), kThreads, 0, stream>>>(c);
  const auto tiles = static_cast<unsigned>((c.seq_len + kTile - 1) / kTile), B = static_cast<unsigned>(c.B);
  const dim3 q_grid(tiles, static_cast<unsigned>(c.num_heads), B), kv_grid(tiles, static_cast<unsigned>(c.num_kv_heads), B);
  dispatch_columns(c.D, [&]<int kColumns>() {
    launch_tiles(attention_backward_q<kColumns>, q_grid, 4, c, stream);
    launch_tiles(attention_backward_kv<kColumns>, kv_grid, 4, c, stream);
  });
}

}  // namespace waybill::cuda
