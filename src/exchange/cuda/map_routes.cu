// SPDX-License-Identifier: Apache-2.0
// Dense maps: d_weights [T, K] of routes out of d_map [T, E]; routes that name an expert twice both get its value. A thread a route.
#include "core/cuda/num_sms.h"
#include "exchange/cuda/map_kernels.h"
#include "exchange/cuda/plan_tile.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

template <class Id>
__global__ void __launch_bounds__(kThreads) exchange_map_routes(const __grid_constant__ ExchangeParams q) {
  const RankCall& call = q.call[blockIdx.y];
  const std::int64_t count = static_cast<std::int64_t>(call.T) * q.shape.K;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const int id = static_cast<const Id*>(call.a)[i];
    static_cast<float*>(call.c)[i] = is_valid_id(id, q.shape.E) ? static_cast<const float*>(call.b)[i / q.shape.K * q.shape.E + id] : 0.0f;
  }
}

}  // namespace

void launch_map_routes(const ExchangeParams& q, cudaStream_t stream) {
  launch_ranks(q.shape.id_bytes == 2 ? exchange_map_routes<std::int16_t> : exchange_map_routes<std::int32_t>, num_sms(), kThreads, 0, false, stream, q);
}

}  // namespace waybill::cuda
