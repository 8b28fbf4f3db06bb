// SPDX-License-Identifier: Apache-2.0
// A tile of arrived rows: which experts they visit. One bit a (row, expert), so that counts are popcounts and the place of a slot within
// the tile is the number of bits below its own: stable, without order between threads. Shared by the kernels that count and scatter.
//
// Worked example, rows {0: experts 1; 1: experts 0, 1}: bits[0] = 0b10, bits[1] = 0b11; slot (row 1, expert 1) has place 1.
#pragma once

#include "exchange/cuda/exchange_signal.cuh"

namespace waybill::cuda {

inline constexpr int kLayoutThreads = 512;

struct LayoutTile {
  int first, num_rows;  // rows
  int begin, end;       // row-order slots
};

// starts [rows of a tile + 1] in shared memory: first slot of each row.
__device__ __forceinline__ LayoutTile load_tile(const ExchangeParams& q, int rank, const HandleHeader& header, int* starts) {
  const int rows = q.shape.layout_rows;
  LayoutTile tile{};
  tile.first = static_cast<int>(blockIdx.x) * rows;
  tile.num_rows = min(rows, max(0, header.R - tile.first));
  const auto* meta = q.window<RowMeta>(rank, q.shape.row_meta);
  for (int i = static_cast<int>(threadIdx.x); i <= tile.num_rows; i += kLayoutThreads) {
    const int row = tile.first + i;
    starts[i] = row < header.R ? __ldcg(&meta[row].slot_begin) : header.S;
  }
  __syncthreads();
  if (tile.num_rows > 0) tile.begin = starts[0], tile.end = starts[tile.num_rows];
  return tile;
}

// Row of the tile that slot j belongs to.
__device__ __forceinline__ int row_of_slot(const int* starts, int num_rows, int j) {
  int low = 0, high = num_rows;  // starts[low] <= j < starts[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= j)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ __forceinline__ int local_id_of_slot(const ExchangeParams& q, int rank, int j) {
  return q.shape.local_id_bytes == 2 ? static_cast<int>(__ldcg(q.window<short>(rank, q.shape.slot_ids) + j))
                                     : __ldcg(q.window<int>(rank, q.shape.slot_ids) + j);
}

// bits [L][kWords]. True: some row names an expert twice. Ends with a barrier.
template <int kWords>
__device__ __forceinline__ bool mark_tile(const ExchangeParams& q, int rank, const LayoutTile& tile, const int* starts, std::uint32_t* bits) {
  for (int i = static_cast<int>(threadIdx.x); i < q.shape.L * kWords; i += kLayoutThreads) bits[i] = 0;
  __syncthreads();
  bool twice = false;
  for (int j = tile.begin + static_cast<int>(threadIdx.x); j < tile.end; j += kLayoutThreads) {
    const int e = local_id_of_slot(q, rank, j), row = row_of_slot(starts, tile.num_rows, j);
    const std::uint32_t bit = 1u << (row & 31);
    twice |= (atomicOr(bits + e * kWords + (row >> 5), bit) & bit) != 0;
  }
  return __syncthreads_or(twice ? 1 : 0) != 0;
}

template <int kWords>
__device__ __forceinline__ int bits_below(const std::uint32_t* bits, int e, int row) {
  int below = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const std::uint32_t word = bits[e * kWords + w];
    below += w < (row >> 5) ? __popc(word) : (w == (row >> 5) ? __popc(word & ((1u << (row & 31)) - 1)) : 0);
  }
  return below;
}

inline std::size_t layout_smem(const ExchangeShape& shape) { return static_cast<std::size_t>(shape.L) * static_cast<std::size_t>(shape.layout_rows) / 8; }

}  // namespace waybill::cuda
