// SPDX-License-Identifier: Apache-2.0
// Two-level exchange: which tokens go to which node, and with which of their routes. Order without atomics: a CTA a node goes through the tokens.
//
// node_routes: grid (N), 1,024 threads. Reads [T, K] ids once a node. node_trim: grid (8, N). node_values: grid (64).
// Worked example, N = 2, E = 4, own node 0, ids {{2, 0}, {1, 0}, {3, -1}}: node 1 gets tokens {0, 2} with ids {{0, -1}, {1, -1}}, node 0 keeps
// {{-1, 0}, {1, 0}, {-1, -1}} at tokens 0, 1, 2.
#include "exchange/cuda/node_lost.cuh"
#include "exchange/cuda/plan_tile.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 1024;

__device__ __forceinline__ int id_at(const void* ids, int bytes, std::int64_t at) {
  return bytes == 2 ? static_cast<const std::int16_t*>(ids)[at] : static_cast<const std::int32_t*>(ids)[at];
}
__device__ __forceinline__ void put_id(void* ids, int bytes, std::int64_t at, int id) {
  if (bytes == 2) {
    static_cast<std::int16_t*>(ids)[at] = static_cast<std::int16_t>(id);
  } else {
    static_cast<std::int32_t*>(ids)[at] = id;
  }
}

// Number of this thread among the CTA's threads with `is_in`, and their total.
__device__ __forceinline__ int place_of(bool is_in, int* warp_sums, int& total) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const unsigned ballot = __ballot_sync(ptx::kFullWarp, is_in);
  if (lane == 0) warp_sums[warp] = __popc(ballot);
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    before += w < warp ? warp_sums[w] : 0;
    total += warp_sums[w];
  }
  __syncthreads();
  return before + __popc(ballot & ptx::lanemask_lt());
}

// Routes of token t for experts [first, first + count), as ids from 0, to row `to`.
__device__ __forceinline__ void write_routes(const NodeArgs& args, int t, int first, int count, bool keeps_bad, void* ids, float* weights, std::int64_t to) {
  for (int k = 0; k < args.K; ++k) {
    const std::int64_t at = static_cast<std::int64_t>(t) * args.K + k;
    const int id = id_at(args.ids, args.id_bytes, at);
    const bool is_here = id >= first && id < first + count;
    put_id(ids, args.node_id_bytes, to * args.K + k, is_here ? id - first : (keeps_bad && is_wrong_id(id, args.E) ? -2 : -1));
    weights[to * args.K + k] = is_here ? args.weights[at] : 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads) exchange_node_routes(const NodeArgs args) {
  __shared__ int warp_sums[kThreads / 32];
  const int m = static_cast<int>(blockIdx.x), count = args.E / args.N, first = m * count;
  const bool is_own = m == args.node;
  const std::int64_t part = static_cast<std::int64_t>(m) * args.T_max;
  int rows = 0;
  for (int base = 0; base < args.T_max; base += kThreads) {
    const int t = base + static_cast<int>(threadIdx.x);
    bool is_in = false;
    for (int k = 0; t < args.T && k < args.K; ++k) {
      const int id = id_at(args.ids, args.id_bytes, static_cast<std::int64_t>(t) * args.K + k);
      is_in |= id >= first && id < first + count;
    }
    int total = 0;
    const int place = rows + place_of(is_in, warp_sums, total);
    rows += total;
    if (t >= args.T_max) continue;
    args.position[part + t] = is_in ? (is_own ? t : place) : -1;
    if (is_own) {
      if (t < args.T) {
        write_routes(args, t, first, count, true, args.node_ids, args.node_weights, part + t);
      } else {
        for (int k = 0; k < args.K; ++k) put_id(args.node_ids, args.node_id_bytes, (part + t) * args.K + k, -1);
      }
    } else if (is_in) {
      args.token[part + place] = t;
      write_routes(args, t, first, count, false, args.send_ids, args.send_weights, part + place);
    }
  }
  if (threadIdx.x == 0) args.send_header[m] = ChunkHeader{rows, {0, 0, 0}};
}

__global__ void __launch_bounds__(kThreads) exchange_node_trim(const NodeArgs args, const ChunkHeader* received) {
  const int m = static_cast<int>(blockIdx.y);
  if (m == args.node) return;
  const int rows = min(max(received[m].rows, 0), args.T_max);
  const std::int64_t part = static_cast<std::int64_t>(m) * args.T_max * args.K, end = static_cast<std::int64_t>(args.T_max) * args.K;
  for (std::int64_t i = static_cast<std::int64_t>(rows) * args.K + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) {
    put_id(args.node_ids, args.node_id_bytes, part + i, -1);
  }
}

__global__ void __launch_bounds__(kThreads) exchange_node_values(const NodeArgs args, const float* own, const float* returned, float* d_weights) {
  const std::int64_t count = static_cast<std::int64_t>(args.T) * args.K;
  const bool is_lost = is_given_up(args);
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < count; at += gridDim.x * kThreads) {
    const int id = id_at(args.ids, args.id_bytes, at), t = static_cast<int>(at / args.K), k = static_cast<int>(at % args.K);
    float value = 0;
    if (is_valid_id(id, args.E) && !is_lost) {
      const int m = id / (args.E / args.N);
      const std::int64_t part = static_cast<std::int64_t>(m) * args.T_max;
      value = (m == args.node ? own : returned)[(part + args.position[part + t]) * args.K + k];
    }
    d_weights[at] = value;
  }
}

}  // namespace

void launch_node_routes(const NodeArgs& args, cudaStream_t stream) { exchange_node_routes<<<static_cast<unsigned>(args.N), kThreads, 0, stream>>>(args); }
void launch_node_trim(const NodeArgs& args, const ChunkHeader* received, cudaStream_t stream) {
  exchange_node_trim<<<dim3(8, static_cast<unsigned>(args.N)), kThreads, 0, stream>>>(args, received);
}
void launch_node_values(const NodeArgs& args, const float* own, const float* returned, float* d_weights, cudaStream_t stream) {
  exchange_node_values<<<64, kThreads, 0, stream>>>(args, own, returned, d_weights);
}

}  // namespace waybill::cuda
