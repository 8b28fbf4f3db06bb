// SPDX-License-Identifier: Apache-2.0
// Layout, second step: what lies before each (expert, tile), the experts' counts and, by the last CTA, their offsets.
//
// Grid (warps for L experts, ranks), 256 threads, a warp an expert. expert_tiles becomes its exclusive prefix along the tiles. Experts start
// at multiples of the alignment; or, where plan_map() pads to capacity, all have one number of slots.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/tile_scan.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads) exchange_layout_scan(const __grid_constant__ ExchangeParams q) {
  __shared__ int warp_sums[kWarps];
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y], L = shape.L, a = shape.alignment;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  begin_exchange_kernel();
  int* counts = handle_part<int>(call, shape.h_expert_counts);
  const int num_tiles = (header_of(call)->R + shape.layout_rows - 1) / shape.layout_rows;
  for (int e = static_cast<int>(blockIdx.x) * kWarps + warp; e < L; e += static_cast<int>(gridDim.x) * kWarps) {
    const int total = warp_scan_in_place(q.window<int>(rank, shape.expert_tiles) + static_cast<std::int64_t>(e) * shape.layout_tiles, num_tiles);
    if (lane == 0) counts[e] = total;
  }
  if (!last_cta(q, rank, kTicketLayoutScan)) return;
  int* offsets = handle_part<int>(call, shape.h_expert_offsets);
  const int fixed = header_of(call)->valid - 1;  // see plan_map()
  int carry = 0;
  for (int first = 0; first < L; first += kThreads) {
    const int e = first + static_cast<int>(threadIdx.x);
    const int n = e < L ? (fixed > 0 ? fixed : (__ldcg(counts + e) + a - 1) / a * a) : 0;
    const int scan = warp_inclusive(n);
    if (lane == 31) warp_sums[warp] = scan;
    __syncthreads();
    int before = carry, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? warp_sums[w] : 0;
      total += warp_sums[w];
    }
    if (e < L) offsets[e] = before + scan - n;
    carry += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) offsets[L] = header_of(call)->S_padded = carry;
}

}  // namespace

void launch_layout_scan(const ExchangeParams& q, bool overlap, cudaStream_t stream) {
  const int ctas = (q.shape.L + kWarps - 1) / kWarps;
  launch_ranks(exchange_layout_scan, ctas < 264 ? ctas : 264, kThreads, 0, overlap, stream, q);
}

}  // namespace waybill::cuda
