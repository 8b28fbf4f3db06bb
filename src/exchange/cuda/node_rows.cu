// SPDX-License-Identifier: Apache-2.0
// Two-level exchange: rows of each node put together, and what the nodes send back added up.
//
// Grid (128, N) and (264), 512 threads, a warp a row. node_rows reads a row once for each node that needs it. node_sum adds in node order in
// fp32, starting with the first part; what crossed no link comes last, as in combine.
#include "exchange/cuda/node_lost.cuh"
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
__global__ void __launch_bounds__(kRowThreads) exchange_node_sum(const NodeArgs args, const NodeSum sum) {
  constexpr int kValues = Vector<Wire>::kValues;
  const int lane = static_cast<int>(threadIdx.x) & 31, H = sum.H;
  const bool is_lost = is_given_up(args), is_valid = sum.header->valid != 0 && !is_lost;
  if (is_lost && blockIdx.x == 0 && threadIdx.x == 0) mark_given_up(args, sum.header);
  for (int t = static_cast<int>((threadIdx.x >> 5) * gridDim.x + blockIdx.x); t < args.T; t += static_cast<int>(gridDim.x) * (kRowThreads / 32)) {
    for (int h = lane * kValues; h < H; h += 32 * kValues) {
      float total[kValues] = {};
      bool is_first = true;
      const auto add = [&](const Wire* from) {
        float x[kValues];
        Vector<Wire>::to_float(load_row(from + h), x);
#pragma unroll
        for (int j = 0; j < kValues; ++j) total[j] = is_first ? x[j] : total[j] + x[j];
        is_first = false;
      };
      for (int m = 0; m < args.N && is_valid; ++m) {
        const int place = args.position[static_cast<std::int64_t>(m) * args.T_max + t];
        if (place < 0) continue;
        add(m == args.node ? static_cast<const Wire*>(sum.own) + static_cast<std::int64_t>(t) * H
                           : static_cast<const Wire*>(sum.returned) + (static_cast<std::int64_t>(m) * args.T_max + place) * H);
      }
      if (sum.base != nullptr && is_valid) add(static_cast<const Wire*>(sum.base) + static_cast<std::int64_t>(t) * H);
      store_values<Out>(static_cast<Out*>(sum.out) + t * sum.out_stride + h, total);
    }
  }
}

}  // namespace

void launch_node_rows(const NodeArgs& args, const void* x, std::int64_t stride, std::int32_t bytes, void* send, void* own, cudaStream_t stream) {
  exchange_node_rows<<<dim3(128, static_cast<unsigned>(args.N)), kRowThreads, 0, stream>>>(args, static_cast<const unsigned char*>(x), stride, bytes,
                                                                                           static_cast<unsigned char*>(send), static_cast<unsigned char*>(own));
}

void launch_node_sum(const NodeArgs& args, const NodeSum& sum, RowType wire, RowType out, cudaStream_t stream) {
  with_row_type(wire, [&](auto* w) {
    with_row_type(out, [&](auto* o) {
      exchange_node_sum<std::remove_pointer_t<decltype(w)>, std::remove_pointer_t<decltype(o)>><<<264, kRowThreads, 0, stream>>>(args, sum);
    });
  });
}

}  // namespace waybill::cuda
