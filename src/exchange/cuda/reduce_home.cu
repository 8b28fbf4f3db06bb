// SPDX-License-Identifier: Apache-2.0
// Expert order to tokens where one rank is the whole group (sm_90): no row crosses a link, so there are no partials. What unpermute_reduce and combine do, in
// one pass and with their bits: f32 sums of a token's slots in order k, then base.
//
// Grid (ctas, 1), 512 threads. a: y [S_padded, H], c: out [T, H], d: base f32 [T, base_stride] or null. Waits for nobody. Bytes: S rows read, T written.
#include "exchange/cuda/combine_parts.cuh"
#include "exchange/cuda/slot_parts.cuh"

namespace waybill::cuda {
namespace {

struct TokenSums {
  SlotsAhead<TokensInOrder, false> ahead;
  const RankCall& call;
  std::int64_t out_stride, base_stride;
  __device__ __forceinline__ int take(const RowItems& items, int item) {
    ahead.take(items, item);
    return ahead.num;
  }
  __device__ __forceinline__ float weight(int) const { return 1.0f; }
  template <class Out>
  __device__ __forceinline__ Out* out(const RowItems& items, int item) const {
    return static_cast<Out*>(call.c) + items.row(item) * out_stride;
  }
  __device__ __forceinline__ const float* base(const RowItems& items, int item) const {
    return call.d == nullptr ? nullptr : static_cast<const float*>(call.d) + items.row(item) * base_stride;
  }
  __device__ __forceinline__ void done(const RowItems&, int) const {}
};

template <class Y, class Out>
__global__ void __launch_bounds__(kRingWarps * 32, 1)
    exchange_reduce_home(const __grid_constant__ ExchangeParams q, const __grid_constant__ ReduceHomeArgs args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RingBarriers full;
  const RankCall& call = q.call[blockIdx.y];
  const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  const Ring ring = make_ring(smem, full, args.stages, args.H * static_cast<int>(sizeof(Y)));
  begin_exchange_kernel();
  if (header_of(call)->valid == 0) return clear_out<Out>(CombineArgs{0, 0, args.out_stride, args.H, 0}, call, cta, ctas);
  ptx::fence_async_proxy_all();  // y was written by ordinary stores
  const TokensInOrder order{call.T};
  const RowItems items(call.T, (ring.row_bytes + kRingPiece - 1) / kRingPiece, cta, ctas, 12);
  SlotParts<TokensInOrder> parts(q.shape, call, order, items, call.a, args.slot_stride * static_cast<std::int64_t>(sizeof(Y)));
  TokenSums sums{SlotsAhead<TokensInOrder, false>(q.shape, call, order, items), call, args.out_stride, args.base_stride};
  if (call.d != nullptr) {
    sum_items<Y, Out, false, true>(items, ring, parts, sums);
  } else {
    sum_items<Y, Out, false>(items, ring, parts, sums);
  }
#endif
}

}  // namespace

void launch_reduce_home(const ExchangeParams& q, const ReduceHomeArgs& args, RowType y, RowType out, int ctas, bool overlap, cudaStream_t stream) {
  with_row_type(y, [&](auto* from) {
    with_row_type(out, [&](auto* to) {
      launch_ranks(exchange_reduce_home<std::remove_pointer_t<decltype(from)>, std::remove_pointer_t<decltype(to)>>, ctas, kRingWarps * 32,
                   ring_smem(kRingWarps, args.stages), overlap, stream, q, args);
    });
  });
}

}  // namespace waybill::cuda
