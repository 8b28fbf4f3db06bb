// SPDX-License-Identifier: Apache-2.0
// Backward of unpermute_reduce: dy[slot] = (weight) * dz[row], d_weight[slot] = <y[slot], dz[row]>; 0 at padding slots.
//
// Grid (ctas, ranks), 512 threads, a warp a row: its slots one after the other, dz from L1. The dot is summed by lane in column order, then
// by a butterfly: fixed. a: y [S_padded, H] or null (no d_weight), b: dz [R, H], c: dy [S_padded, H] (may be y itself), d: d_weight
// [S_padded] f32 or null. Bytes: S rows of y read, S_padded of dy written, R rows of dz read.
#include "exchange/cuda/expert_rows.cuh"

namespace waybill::cuda {
namespace {

template <class T>
__device__ __forceinline__ void load_values(const T* p, float (&x)[8]) {
  if constexpr (sizeof(T) == 2) {
    Vector<T>::to_float(*reinterpret_cast<const uint4*>(p), x);
  } else {
    const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
}

template <class Y, class Dz>
__global__ void __launch_bounds__(kRowThreads, 2) exchange_unpermute_backward(const __grid_constant__ ExchangeParams q, const RowsArgs args) {
  const ExchangeShape& shape = q.shape;
  const RankCall& call = q.call[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  begin_exchange_kernel();
  const int R = header_of(call)->R;
  const int warp = static_cast<int>(threadIdx.x >> 5) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  const int num_warps = static_cast<int>(gridDim.x) * (kRowThreads / 32);
  const Y* y = static_cast<const Y*>(call.a);
  Y* dy = static_cast<Y*>(call.c);
  auto* d_weight = static_cast<float*>(call.d);
  const int* row_slot_offsets = handle_part<int>(call, shape.h_row_slot_offsets);
  for (int row = warp; row < R; row += num_warps) {
    const Dz* dz = static_cast<const Dz*>(call.b) + row * args.row_stride;
    const int begin = row_slot_offsets[row], end = row_slot_offsets[row + 1];
    for (int first = begin; first < end; first += 32) {
      const RowSlots slots = load_slots(shape, call, first, end, args.weighted != 0);
      for (int j = 0; j < slots.num; ++j) {
        const std::int64_t position = __shfl_sync(ptx::kFullWarp, slots.position, j);
        const float weight = __shfl_sync(ptx::kFullWarp, slots.weight, j);
        float dot = 0.0f;
#pragma unroll 1
        for (int h = lane * 8; h < args.H; h += 256) {
          float g[8], out[8];
          load_values(dz + h, g);
          if (d_weight != nullptr) {
            float v[8];
            load_values(y + position * args.slot_stride + h, v);
#pragma unroll
            for (int n = 0; n < 8; ++n) dot = fmaf(v[n], g[n], dot);
          }
#pragma unroll
          for (int n = 0; n < 8; ++n) out[n] = weight * g[n];
          store_values<Y>(dy + position * args.slot_stride + h, out);
        }
        if (d_weight == nullptr) continue;
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) dot += __shfl_xor_sync(ptx::kFullWarp, dot, step);
        if (lane == 0) d_weight[position] = dot;
      }
    }
  }
  for_padding(shape, call, num_warps, warp, [&](int s) {
    const float zeros[8] = {};
    for (int h = lane * 8; h < args.H; h += 256) store_values<Y>(dy + s * args.slot_stride + h, zeros);
    if (d_weight != nullptr && lane == 0) d_weight[s] = 0.0f;
  });
}

}  // namespace

void launch_unpermute_backward(const ExchangeParams& q, const RowsArgs& args, RowType y, RowType dz, int ctas, bool overlap, cudaStream_t stream) {
  with_row_type(y, [&](auto* a) {
    with_row_type(dz, [&](auto* b) {
      launch_ranks(exchange_unpermute_backward<std::remove_pointer_t<decltype(a)>, std::remove_pointer_t<decltype(b)>>, ctas, kRowThreads, 0, overlap, stream,
                   q, args);
    });
  });
}

}  // namespace waybill::cuda
