// SPDX-License-Identifier: Apache-2.0
// A row is read once and written to its place in expert order at the rank of each of its experts: no permute on the other side, and K payloads on
// the link instead of one a rank. Places are given; no signal is posted.
#include "bench/negative/cuda/older_designs.h"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 512, kVectors = 4, kPiece = kVectors * 512;

__global__ void __launch_bounds__(kThreads) write_direct(const DirectWrite w, const unsigned char* x) {
  const int lane = static_cast<int>(threadIdx.x) & 31, pieces = (w.row_bytes + kPiece - 1) / kPiece, num_warps = static_cast<int>(gridDim.x) * (kThreads / 32);
  for (int item = static_cast<int>((threadIdx.x >> 5) * gridDim.x + blockIdx.x); item < w.T * pieces; item += num_warps) {
    const int t = item / pieces, at = item % pieces * kPiece + lane * 16;
    uint4 v[kVectors] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (at + i * 512 < w.row_bytes) v[i] = load_row(x + static_cast<std::int64_t>(t) * w.row_bytes + at + i * 512);
    }
    for (int k0 = 0; k0 < w.K; k0 += 32) {
      const DirectTarget target = k0 + lane < w.K ? w.target[static_cast<std::int64_t>(t) * w.K + k0 + lane] : DirectTarget{-1, 0};
      for (int k = 0; k < min(32, w.K - k0); ++k) {
        const int rank = __shfl_sync(ptx::kFullWarp, target.rank, k), position = __shfl_sync(ptx::kFullWarp, target.position, k);
        if (rank < 0) continue;
        unsigned char* to = w.y[rank] + static_cast<std::int64_t>(position) * w.row_bytes + at;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (at + i * 512 < w.row_bytes) store_row(to + i * 512, v[i]);
        }
      }
    }
  }
}

}  // namespace

void launch_direct_write(const DirectWrite& w, const void* x, int ctas, cudaStream_t stream) {
  write_direct<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(w, static_cast<const unsigned char*>(x));
}

}  // namespace waybill::cuda
