// SPDX-License-Identifier: Apache-2.0
// Dense maps: per-slot scalars back to the columns of the map, d_map [T, E]; 0 where nothing is routed. Grid (ctas, ranks), 512 threads, a warp a token;
// the launch must be resident. b: cells [T, E] of the forward, c: d_map. Bytes over the links: 4 a slot.
#include "exchange/cuda/map_kernels.h"
#include "exchange/cuda/slot_values.cuh"

namespace waybill::cuda {
namespace {

__global__ void __launch_bounds__(kRowThreads, 2) exchange_map_values(const __grid_constant__ ExchangeParams q) {
  __shared__ int next[kRowThreads / 32][kMaxDevicePeers];
  const int E = q.shape.E;
  const auto* cells = static_cast<const std::uint8_t*>(q.call[blockIdx.y].b);
  read_slot_values(q, E, static_cast<float*>(q.call[blockIdx.y].c), next,
                   [&](int t, int e) { return cells[static_cast<std::int64_t>(t) * E + e] != 0 ? e : -1; });
}

}  // namespace

const void* map_values_kernel() { return reinterpret_cast<const void*>(&exchange_map_values); }

void launch_map_values(const ExchangeParams& q, int ctas, cudaStream_t stream) { launch_ranks(exchange_map_values, ctas, kRowThreads, 0, false, stream, q); }

}  // namespace waybill::cuda
