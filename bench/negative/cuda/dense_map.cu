// SPDX-License-Identifier: Apache-2.0
// The older plan: byte maps [T, E] of all ranks are gathered, every rank scans all of them. Vector loads throughout; counts of a tile are added as
// packed bytes; order by prefix sums, as ours.
#include "bench/negative/cuda/older_designs.h"
#include "exchange/cuda/row_vectors.cuh"
#include "exchange/cuda/tile_scan.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 512;

__device__ __forceinline__ const std::uint8_t* map_row(const DenseMap& m, int s, int t) {
  const std::uint8_t* map = s == m.rank ? m.own : m.gathered[m.rank] + static_cast<std::int64_t>(s) * m.T * m.E;
  return map + static_cast<std::int64_t>(t) * m.E;
}

__global__ void __launch_bounds__(kThreads) map_push(const DenseMap m) {
  const std::int64_t vectors = static_cast<std::int64_t>(m.T) * m.E / 16;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const uint4 v = load_row(m.own + i * 16);
    for (int p = 0; p < m.P; ++p) {
      if (p != m.rank) store_row(m.gathered[p] + static_cast<std::int64_t>(m.rank) * m.T * m.E + i * 16, v);
    }
  }
}

// A warp a token of any rank: which ranks it goes to.
__global__ void __launch_bounds__(kThreads) map_hits(const DenseMap m) {
  const int lane = static_cast<int>(threadIdx.x) & 31, L = m.E / m.P;
  for (int i = static_cast<int>(blockIdx.x * (kThreads / 32) + threadIdx.x / 32); i < m.P * m.T; i += static_cast<int>(gridDim.x) * (kThreads / 32)) {
    const std::uint8_t* row = map_row(m, i / m.T, i % m.T);
    unsigned bits = 0;
    for (int at = lane * 16; at < m.E; at += 512) {
      const uint4 v = load_row(row + at);
      if ((v.x | v.y | v.z | v.w) != 0) bits |= 1u << (at / L);
    }
    bits = ptx::redux_or(bits);
    if (lane == 0) m.hits[i] = bits;
  }
}

// A CTA a destination: rows of all sources, a thread takes neighbours.
__global__ void __launch_bounds__(1024) map_rows(const DenseMap m) {
  __shared__ int sums[32];
  const int p = static_cast<int>(blockIdx.x), count = m.P * m.T, each = (count + 1023) / 1024, first = static_cast<int>(threadIdx.x) * each;
  int own = 0;
  for (int i = first; i < min(count, first + each); ++i) own += static_cast<int>(m.hits[i] >> p & 1u);
  const int scan = warp_inclusive(own), warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 31) sums[warp] = scan;
  __syncthreads();
  int row = scan - own;
  for (int w = 0; w < warp; ++w) row += sums[w];
  for (int i = first; i < min(count, first + each); ++i) {
    m.row[static_cast<std::int64_t>(p) * count + i] = row;
    row += static_cast<int>(m.hits[i] >> p & 1u);
  }
}

// Four experts a thread, a tile of tokens a CTA.
__global__ void __launch_bounds__(kThreads) map_count(const DenseMap m) {
  const int L = m.E / m.P, e = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * 4, tiles = m.P * m.T / kMapTile,
            first = static_cast<int>(blockIdx.x) * kMapTile;
  if (e >= L) return;
  unsigned sum = 0;  // four counts of up to 64
#pragma unroll 8
  for (int i = 0; i < kMapTile; ++i) sum += *reinterpret_cast<const unsigned*>(map_row(m, (first + i) / m.T, (first + i) % m.T) + m.rank * L + e);
#pragma unroll
  for (int j = 0; j < 4; ++j) m.tile_counts[static_cast<std::int64_t>(e + j) * tiles + blockIdx.x] = static_cast<int>(sum >> (8 * j) & 255u);
}

__global__ void __launch_bounds__(256) map_scan(const DenseMap m) {
  const int L = m.E / m.P, tiles = m.P * m.T / kMapTile, e = static_cast<int>(blockIdx.x * 8 + threadIdx.x / 32);
  if (e >= L) return;
  const int total = warp_scan_in_place(m.tile_counts + static_cast<std::int64_t>(e) * tiles, tiles);
  if (threadIdx.x % 32 == 0) m.expert_offsets[e + 1] = total;
}

__global__ void __launch_bounds__(1024) map_offsets(const DenseMap m) {
  __shared__ int sums[32];
  const int L = m.E / m.P, each = (L + 1023) / 1024, first = static_cast<int>(threadIdx.x) * each, warp = static_cast<int>(threadIdx.x) / 32;
  int own = 0;
  for (int e = first; e < min(L, first + each); ++e) own += m.expert_offsets[e + 1];
  const int scan = warp_inclusive(own);
  if (threadIdx.x % 32 == 31) sums[warp] = scan;
  __syncthreads();
  int before = scan - own;
  for (int w = 0; w < warp; ++w) before += sums[w];
  for (int e = first; e < min(L, first + each); ++e) before += m.expert_offsets[e + 1], m.expert_offsets[e + 1] = before;
  if (threadIdx.x == 0) m.expert_offsets[0] = 0;
}

__global__ void __launch_bounds__(kThreads) map_scatter(const DenseMap m) {
  const int L = m.E / m.P, e = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * 4, tiles = m.P * m.T / kMapTile,
            first = static_cast<int>(blockIdx.x) * kMapTile;
  if (e >= L) return;
  int slot[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) slot[j] = m.expert_offsets[e + j] + m.tile_counts[static_cast<std::int64_t>(e + j) * tiles + blockIdx.x];
#pragma unroll 8
  for (int i = 0; i < kMapTile; ++i) {
    const unsigned v = *reinterpret_cast<const unsigned*>(map_row(m, (first + i) / m.T, (first + i) % m.T) + m.rank * L + e);
    if (v == 0) continue;
    const int row = m.row[static_cast<std::int64_t>(m.rank) * m.P * m.T + first + i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((v >> (8 * j) & 255u) != 0) m.slot_row[slot[j]++] = row;
    }
  }
}

}  // namespace

void launch_dense_map_push(const DenseMap& m, cudaStream_t stream) { map_push<<<132, kThreads, 0, stream>>>(m); }

void launch_dense_map_plan(const DenseMap& m, cudaStream_t stream) {
  const int L = m.E / m.P;
  const dim3 tiles(static_cast<unsigned>(m.P * m.T / kMapTile), static_cast<unsigned>((L / 4 + kThreads - 1) / kThreads));
  map_hits<<<264, kThreads, 0, stream>>>(m);
  map_rows<<<static_cast<unsigned>(m.P), 1024, 0, stream>>>(m);
  map_count<<<tiles, kThreads, 0, stream>>>(m);
  map_scan<<<static_cast<unsigned>((L + 7) / 8), 256, 0, stream>>>(m);
  map_offsets<<<1, 1024, 0, stream>>>(m);
  map_scatter<<<tiles, kThreads, 0, stream>>>(m);
}

}  // namespace waybill::cuda
