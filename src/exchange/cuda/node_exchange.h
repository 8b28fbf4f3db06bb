// SPDX-License-Identifier: Apache-2.0
// Two-level exchange on GPUs: a row crosses to another node once, to the rank there that has the sender's index, and is passed on inside that
// node by the flat DeviceExchange; combine mirrors it, one partial sum a node. hierarchy = two_level of waybill/exchange.h for nodes of equal size
// whose ranks lie one behind the other, and consecutive experts.
//
//   between nodes   Rail: chunks of fixed capacity (T_max rows a node), counts in their headers; no host wait, can be captured
//   inside a node   node(): a DeviceExchange of the node's ranks for N * T_max tokens, those of the other nodes' rails included, and E / N experts
//
// Everything between dispatch and combine (layout, permute, matmuls, unpermute_reduce) is called on node() with handle.inside. Rows of an expert lie
// by source index in the node, then source node, then token. Partials inside a node are fp32 (node().wire()); combine_wire says what travels between
// nodes. Bits: those of the CPU engine's two-level exchange. Ranks of a node that wait in vain end in its status word, as in DeviceExchange; a lost
// node is named by NcclWorld::synchronize() within its timeout.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "exchange/cuda/device_exchange.h"
#include "exchange/cuda/node_kernels.h"
#include "fabric/cuda_local/rail.h"

namespace waybill::cuda {

// The config of the exchange inside a node. Refuses, with the values: E that N does not divide, K above E / N.
ExchangeConfig node_config(const ExchangeConfig& config, int N);

class NodeHandle {
 public:
  DeviceHandle inside;

 private:
  friend class NodeExchange;
  struct Rank {
    DeviceBuffer position, token, headers, send_ids, send_weights, ids, weights;
  };
  std::vector<Rank> ranks_;
  std::vector<NodeArgs> args_;
};

class NodeExchange {
 public:
  // config: of the whole group; ranks: of one node, on `device`; windows: booked for node_config() in the node's arenas.
  NodeExchange(const ExchangeConfig& config, Rail& rail, const LocalRanks& ranks, int device, const ExchangeWindows& windows,
               const ExchangeTuning& tuning = {});

  DeviceExchange& node() { return *node_; }
  DType wire() const;  // between nodes
  NodeHandle make_handle() const;

  void plan(NodeHandle& handle, std::span<const DeviceRoute> routes, cudaStream_t stream) const;
  // Rows [T, H] (f32, bf16 or one byte an element) to row window `window` of node(). after_plan as there.
  void dispatch(const NodeHandle& handle, DType dtype, std::span<const DeviceRows> x, std::uint64_t window, bool after_plan, cudaStream_t stream) const;
  // out [T, H] from the partials [R, H] f32 in `window`.
  void combine(const NodeHandle& handle, std::uint64_t window, DType out_dtype, std::span<const DeviceRows> out, cudaStream_t stream) const;
  // values [S_padded] f32 in expert order -> d_weights [T, K].
  void return_slot_values(const NodeHandle& handle, std::span<const float* const> values, std::span<float* const> d_weights, cudaStream_t stream) const;

 private:
  // Row buffers of a rank: what it sends to and gets from each node, and the rows or sums of all its node's tokens.
  struct Rows {
    DeviceBuffer send, all, returned;
  };
  std::size_t part_rows() const { return static_cast<std::size_t>(config_.T_max); }
  // Message of part m of `send` to part m of `receive` (parts of `bytes`) of every other node, for rank i.
  void add_messages(std::vector<RailMessage>& messages, std::size_t i, const void* send, void* receive, std::size_t bytes) const;

  ExchangeConfig config_;
  Rail& rail_;
  int device_;
  std::unique_ptr<DeviceExchange> node_;
  std::vector<Rows> rows_;
};

}  // namespace waybill::cuda
