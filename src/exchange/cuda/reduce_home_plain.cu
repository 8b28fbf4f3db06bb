// SPDX-License-Identifier: Apache-2.0
// What reduce_home does, by plain loads: for GPUs without bulk copies. The same bits, no claim of speed.
//
// Grid (ctas, 1), 256 threads, a warp a token, a lane eight columns at a time. a, c, d as there.
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;  // of a lane

template <class T>
__device__ __forceinline__ void load_columns(const T* from, float (&x)[kColumns]) {
  constexpr int kEach = Vector<T>::kValues;
#pragma unroll
  for (int i = 0; i < kColumns; i += kEach) {
    float part[kEach];
    Vector<T>::to_float(load_row(from + i), part);
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[i + j] = part[j];
  }
}

template <class Y, class Out>
__global__ void __launch_bounds__(kThreads) exchange_reduce_home_plain(const __grid_constant__ ExchangeParams q, const __grid_constant__ ReduceHomeArgs args) {
  const RankCall& call = q.call[blockIdx.y];
  begin_exchange_kernel();
  const bool is_valid = header_of(call)->valid != 0;
  const int lane = static_cast<int>(threadIdx.x) & 31, step = static_cast<int>(gridDim.x * blockDim.x / 32);
  const int* positions = handle_part<int>(call, q.shape.h_slot_position);
  for (int t = static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32); t < call.T; t += step) {
    RowEntry entry = handle_part<RowEntry>(call, q.shape.h_entries)[t];
    if (!is_valid || entry.rank < 0) entry.num_slots = 0;
#pragma unroll 1
    for (int h = lane * kColumns; h < args.H; h += 32 * kColumns) {
      float sum[kColumns] = {}, part[kColumns];
#pragma unroll 1
      for (int k = 0; k < entry.num_slots; ++k) {
        load_columns(static_cast<const Y*>(call.a) + positions[entry.slot_begin + k] * args.slot_stride + h, part);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sum[j] = k == 0 ? part[j] : sum[j] + part[j];
      }
      if (call.d != nullptr && is_valid) {
        load_columns(static_cast<const float*>(call.d) + t * args.base_stride + h, part);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sum[j] = entry.num_slots == 0 ? part[j] : sum[j] + part[j];
      }
      store_values<Out>(static_cast<Out*>(call.c) + t * args.out_stride + h, sum);
    }
  }
}

}  // namespace

void launch_reduce_home_plain(const ExchangeParams& q, const ReduceHomeArgs& args, RowType y, RowType out, int ctas, bool overlap, cudaStream_t stream) {
  with_row_type(y, [&](auto* from) {
    with_row_type(out, [&](auto* to) {
      launch_ranks(exchange_reduce_home_plain<std::remove_pointer_t<decltype(from)>, std::remove_pointer_t<decltype(to)>>, ctas, kThreads, 0, overlap, stream,
                   q, args);
    });
  });
}

}  // namespace waybill::cuda
