// SPDX-License-Identifier: Apache-2.0
// The plan of the dense-map design, from the map of all ranks' tokens, which every rank holds: where a token's row lies at each of its ranks, and for
// this rank as a receiver which slot every (row, local expert) pair has. Two scans over the map and one over [R, L].
#include "bench/cuda/moe/map_kernels.h"
#include "core/cuda/ptx.cuh"

namespace waybill::cuda::moe_bench {
namespace {

constexpr int kThreads = 256;

// A CTA a tile of tokens, a warp a token at a time: which ranks it goes to.
__global__ void __launch_bounds__(kThreads) map_hits(const __grid_constant__ DevPeers peers, const __grid_constant__ MapShape s, const MapPlan plan) {
  __shared__ std::int32_t counts[kMaxMapPeers];
  if (threadIdx.x < kMaxMapPeers) counts[threadIdx.x] = 0;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto* map = peers.at<std::uint8_t>(peers.rank, s.map);
  for (int i = static_cast<int>(threadIdx.x / 32); i < kMapTile; i += kThreads / 32) {
    const int token = static_cast<int>(blockIdx.x) * kMapTile + i;
    if (token >= s.P * s.T_max) break;
    std::uint32_t mask = 0;
    if (token % s.T_max < s.T[token / s.T_max]) {
      const auto* row = reinterpret_cast<const std::uint32_t*>(map + static_cast<std::int64_t>(token) * s.E);
      for (int w = lane; w < s.E / 4; w += 32) {
        if (row[w] != 0) mask |= 1u << (4 * w / s.L);
      }
    }
    mask = ptx::redux_or(mask);
    if (lane == 0) plan.hits[token] = mask;
    if (lane < s.P && (mask >> lane & 1u) != 0) atomicAdd(&counts[lane], 1);
  }
  __syncthreads();
  if (threadIdx.x < static_cast<unsigned>(s.P)) plan.tile_hits[static_cast<int>(blockIdx.x) * s.P + static_cast<int>(threadIdx.x)] = counts[threadIdx.x];
}

// A CTA a tile of tokens: rows before it from the tiles before, then a ballot a rank.
__global__ void __launch_bounds__(kThreads) map_rows(const __grid_constant__ DevPeers peers, const __grid_constant__ MapShape s, const MapPlan plan) {
  __shared__ std::int32_t before[kMaxMapPeers];
  if (threadIdx.x < kMaxMapPeers) before[threadIdx.x] = 0;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(blockIdx.x) * s.P; i += kThreads) atomicAdd(&before[i % s.P], plan.tile_hits[i]);
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) & 31, p = static_cast<int>(threadIdx.x / 32), token = static_cast<int>(blockIdx.x) * kMapTile + lane;
  if (p >= s.P) return;
  const bool inside = token < s.P * s.T_max, hit = inside && (plan.hits[token] >> p & 1u) != 0;
  const unsigned set = __ballot_sync(ptx::kFullWarp, hit);
  const int row = before[p] + __popc(set & ptx::lanemask_lt());
  const bool fits = row < s.row_capacity;
  if (inside) plan.row_of[token * s.P + p] = hit && fits ? row : -1;
  if (hit && !fits) *plan.overflow = 1;
  if (p != peers.rank) return;
  if (hit && fits) plan.row_token[row] = token;
  if (blockIdx.x == gridDim.x - 1 && lane == 0) *plan.num_rows = min(before[p] + __popc(set), s.row_capacity);
}

// A CTA a tile of rows: set columns an expert.
__global__ void __launch_bounds__(kThreads) map_count(const __grid_constant__ DevPeers peers, const __grid_constant__ MapShape s, const MapPlan plan) {
  extern __shared__ std::int32_t counts[];  // [L]
  for (int l = static_cast<int>(threadIdx.x); l < s.L; l += kThreads) counts[l] = 0;
  __syncthreads();
  const int R = *plan.num_rows, words = s.L / 4;
  const auto* map = peers.at<std::uint8_t>(peers.rank, s.map) + s.first(peers.rank);
  for (int i = static_cast<int>(threadIdx.x); i < kMapTile * words; i += kThreads) {
    const int row = static_cast<int>(blockIdx.x) * kMapTile + i / words, word = i % words;
    if (row >= R) break;
    const std::uint32_t set = *reinterpret_cast<const std::uint32_t*>(map + static_cast<std::int64_t>(plan.row_token[row]) * s.E + 4 * word);
    if (set == 0) continue;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if ((set >> (8 * b) & 0xffu) != 0) atomicAdd(&counts[4 * word + b], 1);
    }
  }
  __syncthreads();
  for (int l = static_cast<int>(threadIdx.x); l < s.L; l += kThreads)
    plan.expert_tiles[l * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)] = counts[l];
}

// A warp an expert: rows before each tile.
__global__ void __launch_bounds__(kThreads) map_tile_scan(const __grid_constant__ MapShape s, const MapPlan plan, const int tiles) {
  const int l = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) & 31;
  if (l >= s.L) return;
  int sum = 0;
  for (int first = 0; first < tiles; first += 32) {
    const int tile = first + lane, count = tile < tiles ? plan.expert_tiles[l * tiles + tile] : 0;
    int inclusive = count;
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(ptx::kFullWarp, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    if (tile < tiles) plan.expert_tiles[l * tiles + tile] = sum + inclusive - count;
    sum += __shfl_sync(ptx::kFullWarp, inclusive, 31);
  }
  if (lane == 0) plan.expert_rows[l] = sum;
}

// One CTA: offsets of the local experts.
__global__ void __launch_bounds__(1024) map_offsets(const __grid_constant__ MapShape s, const MapPlan plan) {
  __shared__ std::int32_t sums[1025];
  const int t = static_cast<int>(threadIdx.x), share = (s.L + 1023) / 1024;
  int mine = 0;
  for (int l = t * share; l < min(s.L, (t + 1) * share); ++l) mine += plan.expert_rows[l];
  if (t == 0) sums[0] = 0;
  sums[t + 1] = mine;
  __syncthreads();
  for (int d = 1; d < 1024; d *= 2) {
    const int other = t + 1 > d ? sums[t + 1 - d] : 0;
    __syncthreads();
    sums[t + 1] += other;
    __syncthreads();
  }
  int at = sums[t];
  for (int l = t * share; l < min(s.L, (t + 1) * share); ++l) plan.offsets[l] = min(at, s.slot_capacity), at += plan.expert_rows[l];
  if (t == 1023) {
    plan.offsets[s.L] = min(sums[1024], s.slot_capacity);
    if (sums[1024] > s.slot_capacity) *plan.overflow = 1;
  }
}

// A CTA a tile of rows, a thread a column: the tile's rows are read first, then numbered.
__global__ void __launch_bounds__(kThreads) map_slots(const __grid_constant__ DevPeers peers, const __grid_constant__ MapShape s, const MapPlan plan) {
  __shared__ std::int32_t tokens[kMapTile];
  const int R = *plan.num_rows, first_row = static_cast<int>(blockIdx.x) * kMapTile;
  if (first_row >= R) return;
  if (threadIdx.x < kMapTile)
    tokens[threadIdx.x] = first_row + static_cast<int>(threadIdx.x) < R ? plan.row_token[first_row + static_cast<int>(threadIdx.x)] : -1;
  __syncthreads();
  const auto* map = peers.at<std::uint8_t>(peers.rank, s.map) + s.first(peers.rank);
  for (int l = static_cast<int>(threadIdx.x); l < s.L; l += kThreads) {
    std::uint32_t set = 0;
#pragma unroll 8
    for (int i = 0; i < kMapTile; ++i) {
      const int token = tokens[i];
      if (token >= 0 && map[static_cast<std::int64_t>(token) * s.E + l] != 0) set |= 1u << i;
    }
    int position = plan.offsets[l] + plan.expert_tiles[l * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)];
    for (int i = 0; i < kMapTile && first_row + i < R; ++i) {
      const bool taken = (set >> i & 1u) != 0 && position < s.slot_capacity;
      plan.slot_map[static_cast<std::int64_t>(first_row + i) * s.L + l] = taken ? position : -1;
      position += static_cast<int>(set >> i & 1u);
    }
  }
}

}  // namespace

void launch_map_plan(const DevPeers& peers, const MapShape& s, const MapPlan& plan, cudaStream_t stream) {
  const auto token_tiles = static_cast<unsigned>((s.P * s.T_max + kMapTile - 1) / kMapTile),
             row_tiles = static_cast<unsigned>((s.row_capacity + kMapTile - 1) / kMapTile);
  map_hits<<<token_tiles, kThreads, 0, stream>>>(peers, s, plan);
  map_rows<<<token_tiles, kThreads, 0, stream>>>(peers, s, plan);
  map_count<<<row_tiles, kThreads, static_cast<std::size_t>(s.L) * 4, stream>>>(peers, s, plan);
  map_tile_scan<<<static_cast<unsigned>((s.L + kThreads / 32 - 1) / (kThreads / 32)), kThreads, 0, stream>>>(s, plan, static_cast<int>(row_tiles));
  map_offsets<<<1, 1024, 0, stream>>>(s, plan);
  map_slots<<<row_tiles, kThreads, 0, stream>>>(peers, s, plan);
}

}  // namespace waybill::cuda::moe_bench
