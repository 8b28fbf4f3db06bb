// SPDX-License-Identifier: Apache-2.0
// Values of the slots from expert order to row order, into the window that the sources read (slot_values_return).
//
// Grid (ctas, ranks), 256 threads. a: values [S_padded] f32. Waits until the peers have read the former ones.
#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) exchange_slot_values_gather(const __grid_constant__ ExchangeParams q) {
  const RankCall& call = q.call[blockIdx.y];
  const int rank = q.ranks.rank[blockIdx.y];
  begin_exchange_kernel();
  if (header_of(call)->valid == 0) return;
  if (!await_posted(q, rank, kSignalValuesRead)) return mark_lost(q, rank, call);
  const int* position = handle_part<int>(call, q.shape.h_slot_position);
  float* values = q.window<float>(rank, q.shape.slot_values);
  const int S = header_of(call)->S;
  for (int j = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); j < S; j += static_cast<int>(gridDim.x) * kThreads) {
    values[j] = static_cast<const float*>(call.a)[position[j]];
  }
}

}  // namespace

void launch_slot_values_gather(const ExchangeParams& q, bool overlap, cudaStream_t stream) {
  launch_ranks(exchange_slot_values_gather, 64, kThreads, 0, overlap, stream, q);
}

}  // namespace waybill::cuda
