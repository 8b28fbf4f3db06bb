// SPDX-License-Identifier: Apache-2.0
// Two-level exchange: rows of each node put together, and what the nodes send back added up.
//
// Grid (128, N) and (264), 512 threads, a warp a row. node_rows reads a row once for each node that needs it. node_sum adds in node order in
// fp32, starting with the first part.
#include "exchange/cuda/node_kernels.h"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {
namespace {

__global__ void __launch_bounds__(kRowThreads)
    exchange_node_rows(const NodeArgs args, const unsigned char* x, std::int64_t stride, std::int32_t bytes, unsigned char* send, unsigned char* own) {
  const int m = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) & 31;
  const bool is_own = m == args.node;
  const std::int64_t part = static_cast<std::int64_t>(m) * args.T_max;
  const int rows = is_own ? args.T : args.send_header[m].rows;
  for (int i = static_cast<int>((threadIdx.x >> 5) * gridDim.x + blockIdx.x); i < rows; i += static_cast<int>(gridDim.x) * (kRowThreads / 32)) {
    if (is_own && args.position[part + i] < 0) continue;
    const unsigned char* from = x + (is_own ? i : args.token[part + i]) * stride;
    unsigned char* to = (is_own ? own + static_cast<std::int64_t>(i) * bytes : send + (part + i) * bytes);
    for (int at = lane * 16; at < bytes; at += 512) *reinterpret_cast<uint4*>(to + at) = load_row(from + at);
  }
}

template <class Wire, class Out>
__global__ void __launch_bounds__(kRowThreads)
    exchange_node_sum(const NodeArgs args, const Wire* own, const Wire* returned, Out* out, std::int64_t out_stride, std::int32_t H) {
  constexpr int kValues = Vector<Wire>::kValues;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int t = static_cast<int>((threadIdx.x >> 5) * gridDim.x + blockIdx.x); t < args.T; t += static_cast<int>(gridDim.x) * (kRowThreads / 32)) {
    for (int h = lane * kValues; h < H; h += 32 * kValues) {
      float sum[kValues] = {};
      bool is_first = true;
      for (int m = 0; m < args.N; ++m) {
        const int place = args.position[static_cast<std::int64_t>(m) * args.T_max + t];
        if (place < 0) continue;
        const Wire* from = m == args.node ? own + static_cast<std::int64_t>(t) * H : returned + (static_cast<std::int64_t>(m) * args.T_max + place) * H;
        float x[kValues];
        Vector<Wire>::to_float(load_row(from + h), x);
#pragma unroll
        for (int j = 0; j < kValues; ++j) sum[j] = is_first ? x[j] : sum[j] + x[j];
        is_first = false;
      }
      store_values<Out>(out + t * out_stride + h, sum);
    }
  }
}

}  // namespace

void launch_node_rows(const NodeArgs& args, const void* x, std::int64_t stride, std::int32_t bytes, void* send, void* own, cudaStream_t stream) {
  exchange_node_rows<<<dim3(128, static_cast<unsigned>(args.N)), kRowThreads, 0, stream>>>(args, static_cast<const unsigned char*>(x), stride, bytes,
                                                                                           static_cast<unsigned char*>(send), static_cast<unsigned char*>(own));
}

void launch_node_sum(const NodeArgs& args, RowType wire, RowType out, const void* own, const void* returned, void* to, std::int64_t out_stride, std::int32_t H,
                     cudaStream_t stream) {
  with_row_type(wire, [&](auto* w) {
    with_row_type(out, [&](auto* o) {
      using Wire = std::remove_pointer_t<decltype(w)>;
      using Out = std::remove_pointer_t<decltype(o)>;
      exchange_node_sum<Wire, Out>
          <<<264, kRowThreads, 0, stream>>>(args, static_cast<const Wire*>(own), static_cast<const Wire*>(returned), static_cast<Out*>(to), out_stride, H);
    });
  });
}

}  // namespace waybill::cuda
