// SPDX-License-Identifier: Apache-2.0
// Layout, last step: every slot to its place in expert order, and what a handle keeps of the arrived metadata.
//
// Grid (tiles the row budget can hold, ranks), 512 threads. Writes slot_position (row order -> expert order), slot_row and slot_weight
// (expert order; padding: row -1, weight 0; where the shape lists tokens, the token of a row instead: RowMeta::entry of one rank), row_slot_offsets and
// row_entry.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/layout_tile.cuh"

namespace waybill::cuda {
namespace {

// Padding slots of the experts this CTA takes.
__device__ __forceinline__ void write_padding(const ExchangeParams& q, const RankCall& call, int num_ctas) {
  const int* counts = handle_part<int>(call, q.shape.h_expert_counts);
  const int* offsets = handle_part<int>(call, q.shape.h_expert_offsets);
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  for (int e = static_cast<int>(blockIdx.x) * (kLayoutThreads / 32) + warp; e < q.shape.L; e += num_ctas * (kLayoutThreads / 32)) {
    for (int s = offsets[e] + counts[e] + lane; s < offsets[e + 1]; s += 32) {
      handle_part<int>(call, q.shape.h_slot_row)[s] = -1;
      handle_part<float>(call, q.shape.h_slot_weight)[s] = 0.0f;
    }
  }
}

template <int kWords>
__global__ void __launch_bounds__(kLayoutThreads) exchange_layout_scatter(const __grid_constant__ ExchangeParams q) {
  extern __shared__ __align__(16) std::uint32_t bits[];  // [L][kWords]
  __shared__ int starts[kLayoutTile + 1];
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y];
  begin_exchange_kernel();
  const HandleHeader header = *header_of(call);
  int* row_slot_offsets = handle_part<int>(call, shape.h_row_slot_offsets);
  if (blockIdx.x == 0 && threadIdx.x == 0) row_slot_offsets[header.R] = header.S;
  const int num_tiles = (header.R + shape.layout_rows - 1) / shape.layout_rows;
  if (header.S_padded > header.S) write_padding(q, call, static_cast<int>(gridDim.x));
  if (static_cast<int>(blockIdx.x) >= num_tiles) return;
  const LayoutTile tile = load_tile(q, rank, header, starts);
  (void)mark_tile<kWords>(q, rank, tile, starts, bits);
  const auto* meta = q.window<RowMeta>(rank, shape.row_meta);
  for (int i = static_cast<int>(threadIdx.x); i < tile.num_rows; i += kLayoutThreads) {
    row_slot_offsets[tile.first + i] = starts[i];
    handle_part<int>(call, shape.h_row_entry)[tile.first + i] = __ldcg(&meta[tile.first + i].entry);
  }
  const int* offsets = handle_part<int>(call, shape.h_expert_offsets);
  const int* before = q.window<int>(rank, shape.expert_tiles) + blockIdx.x;
  const float* weights = q.window<float>(rank, shape.slot_weights);
  for (int j = tile.begin + static_cast<int>(threadIdx.x); j < tile.end; j += kLayoutThreads) {
    const int e = local_id_of_slot(q, rank, j), row = row_of_slot(starts, tile.num_rows, j);
    const int s = offsets[e] + before[static_cast<std::int64_t>(e) * shape.layout_tiles] + bits_below<kWords>(bits, e, row);
    handle_part<int>(call, shape.h_slot_position)[j] = s;
    handle_part<int>(call, shape.h_slot_row)[s] = call.lists_tokens != 0 ? __ldcg(&meta[tile.first + row].entry) : tile.first + row;
    if (shape.send_weights != 0) handle_part<float>(call, shape.h_slot_weight)[s] = __ldcg(weights + j);
  }
}

}  // namespace

void launch_layout_scatter(const ExchangeParams& q, bool overlap, cudaStream_t stream) {
  const int tiles = (q.shape.row_budget + q.shape.layout_rows - 1) / q.shape.layout_rows;
  launch_ranks(q.shape.layout_rows == kLayoutTile ? exchange_layout_scatter<kLayoutTile / 32> : exchange_layout_scatter<1>, tiles > 0 ? tiles : 1,
               kLayoutThreads, layout_smem(q.shape), overlap, stream, q);
}

}  // namespace waybill::cuda
