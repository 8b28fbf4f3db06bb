// SPDX-License-Identifier: Apache-2.0
// Launchers of the two-level exchange, one rank each. N nodes, T_max tokens a rank, K experts a token, E experts, E / N consecutive ones a node.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "exchange/cuda/exchange_kernels.h"
#include "waybill/status.h"

namespace waybill::cuda {

// Travels before the rows of a chunk.
struct alignas(16) ChunkHeader {
  std::int32_t rows;
  std::int32_t unused[3];
};

// Of one rank. Arrays by node have N parts of T_max rows; the own node's part of what is sent and received stays unused unless said.
struct NodeArgs {
  std::int32_t N, node, T, T_max, K, E;
  std::int32_t id_bytes, node_id_bytes;  // of the route, and of ids within a node
  const void* ids;                       // [T, K]
  const float* weights;                  // [T, K]
  std::int32_t* position;                // [N][T_max] place of a token among those its node gets, -1: none. Own node: the token's number
  std::int32_t* token;                   // [N][T_max] its inverse
  ChunkHeader* send_header;              // [N]
  void* send_ids;                        // [N][T_max, K]
  float* send_weights;                   // [N][T_max, K]
  const std::uint32_t* poison;           // of this rank: not 0 once the group is given up, and what came over the rail is worthless
  StatusWord* status;
  void* node_ids;       // [N][T_max, K] what this rank's node is to do for it: own part written here, the others received
  float* node_weights;  // [N][T_max, K]
};

// Routes of each node, tokens ascending; the own node's keep their place, and so do bad ids, for its plan to count.
void launch_node_routes(const NodeArgs& args, cudaStream_t stream);
// Rows behind header->rows of each received part get id -1.
void launch_node_trim(const NodeArgs& args, const ChunkHeader* received, cudaStream_t stream);
// x [T] rows of `bytes` (stride bytes apart) to send[m][i] (other nodes) and own[t] (own node).
void launch_node_rows(const NodeArgs& args, const void* x, std::int64_t stride, std::int32_t bytes, void* send, void* own, cudaStream_t stream);
// out [T, H] = sum over nodes, in node order, fp32, of own[t] or returned[m][position], then base[t]; a token of no node gets base or 0, every token of an
// invalid handle 0. A group that was given up: all 0, the handle becomes invalid, kStatusTimeout.
struct NodeSum {
  const void* own;  // [T_max, H] of the wire's type, as returned [N][T_max, H] and base [T, H] (or null) are
  const void* returned;
  const void* base;
  HandleHeader* header;
  void* out;
  std::int64_t out_stride;  // elements
  std::int32_t H;
};
void launch_node_sum(const NodeArgs& args, const NodeSum& sum, RowType wire, RowType out, cudaStream_t stream);
// d_weights [T, K] from own[t, k] or returned[m][position, k]; 0 where there is no route, or the group was given up.
void launch_node_values(const NodeArgs& args, const float* own, const float* returned, float* d_weights, cudaStream_t stream);

// own: invalid where a header [N] of another node is, or the group was given up (kStatusTimeout); the largest demand of all. The own part of headers is not
// read.
void launch_node_verdict(const NodeArgs& args, const HandleHeader* headers, HandleHeader* own, cudaStream_t stream);

}  // namespace waybill::cuda
