// SPDX-License-Identifier: Apache-2.0
// Rows to their slots on the experts' ranks and back: one copy a route. A warp a row in pieces of 1 KB; all accesses 16 bytes.
#include "bench/cuda/moe/slot_kernels.h"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda::moe_bench {
namespace {

constexpr int kThreads = 512;
constexpr int kVectors = 2;
constexpr int kPiece = kVectors * 512;  // bytes

__device__ __forceinline__ void copy_row(unsigned char* to, const unsigned char* from, int bytes, int lane) {
  for (int base = lane * 16; base < bytes; base += 2 * kPiece) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (base + i * 512 < bytes) v[i] = load_row(from + base + i * 512);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (base + i * 512 < bytes) store_row(to + base + i * 512, v[i]);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    slot_push(const __grid_constant__ DevPeers peers, const SlotShape s, const std::uint16_t* __restrict__ sorted, const std::int32_t* __restrict__ order,
              const std::int32_t* __restrict__ offsets, const std::int32_t* __restrict__ begin, const unsigned char* __restrict__ x,
              const float* __restrict__ weights, std::int32_t* place, const std::uint64_t to) {
  const int lane = static_cast<int>(threadIdx.x) & 31, n = s.T * s.K, valid = offsets[s.E];
  const int step = static_cast<int>(gridDim.x) * (kThreads / 32);
  for (int j = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x / 32); j < n; j += step) {
    const int route = order[j];
    if (j >= valid) {
      if (place != nullptr && lane == 0) place[route] = -1;
      continue;
    }
    const int e = sorted[j], rank_in_expert = j - offsets[e], rank = e / s.L;
    const bool kept = s.layout != SlotLayout::kCapacity || rank_in_expert < s.capacity;
    const int row = kept ? begin[e] + rank_in_expert : -1;
    if (place != nullptr && lane == 0) place[route] = row;
    if (!kept) continue;
    copy_row(peers.at<unsigned char>(rank, to) + static_cast<std::int64_t>(row) * s.H * 2, x + static_cast<std::int64_t>(route / s.K) * s.H * 2, s.H * 2, lane);
    if (weights != nullptr && lane == 0) peers.at<float>(rank, s.weight)[row] = weights[route];
  }
}

__global__ void __launch_bounds__(kThreads) slot_clear(const __grid_constant__ DevPeers peers, const SlotShape s, const std::int32_t* __restrict__ local_rows,
                                                       const std::uint64_t to, const bool with_weight) {
  const int lane = static_cast<int>(threadIdx.x) & 31, step = static_cast<int>(gridDim.x) * (kThreads / 32);
  const bool capacity = s.layout == SlotLayout::kCapacity;
  const int blocks = capacity ? s.L * s.P : s.L, size = capacity ? s.capacity : s.longest;
  // An item: 32 rows of a block.
  const int chunks = (size + 31) / 32;
  for (int item = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x / 32); item < blocks * chunks; item += step) {
    const int block = item / chunks, chunk = item % chunks;
    int used = 0;
    if (capacity) {
      used = min(local_rows[block % s.P * s.L + block / s.P], s.capacity);
    } else {
      for (int source = 0; source < s.P; ++source) used += local_rows[source * s.L + block];
    }
    for (int r = max(used, chunk * 32); r < min(size, chunk * 32 + 32); ++r) {
      const std::int64_t row = static_cast<std::int64_t>(block) * size + r;
      unsigned char* p = peers.at<unsigned char>(peers.rank, to) + row * s.H * 2;
      for (int at = lane * 16; at < s.H * 2; at += 512) store_row(p + at, uint4{0, 0, 0, 0});
      if (with_weight && lane == 0) peers.at<float>(peers.rank, s.weight)[row] = 0;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    slot_pull(const __grid_constant__ DevPeers peers, const SlotShape s, const std::int16_t* __restrict__ ids, const std::int32_t* __restrict__ place,
              const std::uint64_t from, const float* __restrict__ addend, unsigned char* out) {
  using V = Vector<__nv_bfloat16>;
  constexpr int kBatch = 4;  // rows in flight
  const int lane = static_cast<int>(threadIdx.x) & 31, step = static_cast<int>(gridDim.x) * (kThreads / 32), bytes = s.H * 2;
  const int pieces = (bytes + kPiece - 1) / kPiece;
  for (int item = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x / 32); item < s.T * pieces; item += step) {
    const int t = item / pieces, piece = item % pieces, at = piece * kPiece + lane * 16;
    float sum[kVectors][8] = {};
    if (addend != nullptr) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (at + i * 512 >= bytes) continue;
        const float4* a = reinterpret_cast<const float4*>(addend + static_cast<std::int64_t>(t) * s.H + (at + i * 512) / 2);
        const float4 low = a[0], high = a[1];
        sum[i][0] = low.x, sum[i][1] = low.y, sum[i][2] = low.z, sum[i][3] = low.w;
        sum[i][4] = high.x, sum[i][5] = high.y, sum[i][6] = high.z, sum[i][7] = high.w;
      }
    }
    for (int k0 = 0; k0 < s.K; k0 += 32) {
      const int k = k0 + lane, row = k < s.K ? place[t * s.K + k] : -1;
      const unsigned char* mine = row >= 0 ? peers.at<unsigned char>(ids[t * s.K + k] / s.L, from) + static_cast<std::int64_t>(row) * bytes : nullptr;
      for (int j0 = 0; j0 < min(32, s.K - k0); j0 += kBatch) {
        uint4 v[kBatch][kVectors];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const auto* source = reinterpret_cast<const unsigned char*>(__shfl_sync(ptx::kFullWarp, reinterpret_cast<unsigned long long>(mine), j0 + j));
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            v[j][i] = uint4{0, 0, 0, 0};
            if (source != nullptr && at + i * 512 < bytes) v[j][i] = load_row(source + at + i * 512);
          }
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            float x[8];
            V::to_float(v[j][i], x);
#pragma unroll
            for (int n = 0; n < 8; ++n) sum[i][n] += x[n];
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (at + i * 512 < bytes) store_row(out + static_cast<std::int64_t>(t) * bytes + at + i * 512, V::from_float(sum[i]));
    }
  }
}

__global__ void slot_values(const __grid_constant__ DevPeers peers, const SlotShape s, const std::int16_t* __restrict__ ids,
                            const std::int32_t* __restrict__ place, float* d_weights) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= s.T * s.K) return;
  const int row = place[i];
  d_weights[i] = row >= 0 ? __ldcg(peers.at<float>(ids[i] / s.L, s.d_weight) + row) : 0.0f;
}

}  // namespace

void launch_slot_push(const DevPeers& peers, const SlotShape& s, const std::uint16_t* sorted, const std::int32_t* order, const std::int32_t* offsets,
                      const std::int32_t* begin, const void* x, const float* weights, std::int32_t* place, std::uint64_t to, int num_sms, cudaStream_t stream) {
  slot_push<<<static_cast<unsigned>(2 * num_sms), kThreads, 0, stream>>>(peers, s, sorted, order, offsets, begin, static_cast<const unsigned char*>(x), weights,
                                                                         place, to);
}

void launch_slot_clear(const DevPeers& peers, const SlotShape& s, const std::int32_t* local_rows, std::uint64_t to, bool with_weight, int num_sms,
                       cudaStream_t stream) {
  slot_clear<<<static_cast<unsigned>(2 * num_sms), kThreads, 0, stream>>>(peers, s, local_rows, to, with_weight);
}

void launch_slot_pull(const DevPeers& peers, const SlotShape& s, const std::int16_t* ids, const std::int32_t* place, std::uint64_t from, const float* addend,
                      void* out, int num_sms, cudaStream_t stream) {
  slot_pull<<<static_cast<unsigned>(2 * num_sms), kThreads, 0, stream>>>(peers, s, ids, place, from, addend, static_cast<unsigned char*>(out));
}

void launch_slot_values(const DevPeers& peers, const SlotShape& s, const std::int16_t* ids, const std::int32_t* place, float* d_weights, cudaStream_t stream) {
  if (s.T > 0) slot_values<<<static_cast<unsigned>((s.T * s.K + 255) / 256), 256, 0, stream>>>(peers, s, ids, place, d_weights);
}

}  // namespace waybill::cuda::moe_bench
