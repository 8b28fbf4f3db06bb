// SPDX-License-Identifier: Apache-2.0
// Per-slot scalars back to their routes: d_weights[t, k] is read from the rank of its expert.
//
// Grid (ctas, ranks), 512 threads, a warp a token; all CTAs wait for the peers' values, so the launch must be resident. a: ids [T, K],
// c: d_weights [T, K] f32, 0 where there is no route (and everywhere on an invalid handle). Bytes over the links: 4 a slot.
#include "exchange/cuda/slot_values.cuh"

namespace waybill::cuda {
namespace {

template <class Id>
__global__ void __launch_bounds__(kRowThreads, 2) exchange_slot_values_return(const __grid_constant__ ExchangeParams q) {
  __shared__ int next[kRowThreads / 32][kMaxDevicePeers];  // next slot of the token at each rank
  const RankCall& call = q.call[blockIdx.y];
  const auto* ids = static_cast<const Id*>(call.a);
  const int K = q.shape.K;
  read_slot_values(q, K, static_cast<float*>(call.c), next, [&](int t, int k) { return static_cast<int>(ids[static_cast<std::int64_t>(t) * K + k]); });
}

}  // namespace

const void* slot_values_return_kernel(int id_bytes) {
  return id_bytes == 2 ? reinterpret_cast<const void*>(&exchange_slot_values_return<std::int16_t>)
                       : reinterpret_cast<const void*>(&exchange_slot_values_return<std::int32_t>);
}

void launch_slot_values_return(const ExchangeParams& q, int ctas, bool overlap, cudaStream_t stream) {
  launch_ranks(q.shape.id_bytes == 2 ? exchange_slot_values_return<std::int16_t> : exchange_slot_values_return<std::int32_t>, ctas, kRowThreads, 0, overlap,
               stream, q);
}

}  // namespace waybill::cuda
