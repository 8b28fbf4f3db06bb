// SPDX-License-Identifier: Apache-2.0
// Two-level exchange on GPUs: a row crosses to another node once, to the rank there that has the sender's index, and is passed on inside that
// node by the flat exchange that this class is; combine mirrors it, one partial sum a node. hierarchy = two_level of waybill/exchange.h for nodes of equal
// size whose ranks lie one behind the other, and consecutive experts.
//
//   between nodes   Rail: chunks of fixed capacity (T_max rows a node), counts in their headers; no host wait, can be captured
//   inside a node   DeviceExchange of the node's ranks for N * T_max tokens, those of the other nodes' rails included, and E / N experts
//
// Everything between dispatch and combine (layout, permute, matmuls, unpermute_reduce) is the node's own. Rows of an expert lie by source index in the node,
// then source node, then token: with one rank a node in the order of one domain, to the bit. Partials inside a node are fp32; combine_wire says what travels
// between nodes. Bits: those of the CPU engine's two-level exchange. An exceeded budget is told to all nodes within plan(). Ranks of a node that wait in vain
// end in its status word, as in DeviceExchange; once the group is given up (NcclWorld, which names the lost rank) handles become invalid, results 0, and the
// status word has kStatusTimeout with peer -1. Calls share buffers: one stream, or streams that are ordered, for all calls that cross nodes.
#pragma once

#include <span>
#include <vector>

#include "exchange/cuda/device_exchange.h"
#include "exchange/cuda/node_kernels.h"
#include "fabric/cuda_local/rail.h"

namespace waybill::cuda {

// The config of the exchange inside a node. Refuses, with the values: E that N does not divide, K above E / N. Budgets stay.
ExchangeConfig node_config(const ExchangeConfig& config, int N);

// What a handle keeps beside the node's plan, of one rank: places in one buffer. The one place that knows sizes.
struct NodePlan {
  std::uint64_t position, token, headers, verdicts, ids;
  std::size_t bytes;
  std::size_t scratch_bytes;  // of each of the three row buffers of the exchange
  NodePlan(const ExchangeConfig& config, int N);
};

class NodeExchange final : public DeviceExchange {
 public:
  // config: of the whole group; ranks: of one node, on `device`; windows: booked for node_config() in the node's arenas. See make_exchange().
  NodeExchange(const ExchangeConfig& config, Rail& rail, const LocalRanks& ranks, int device, const ExchangeWindows& windows,
               const ExchangeTuning& tuning = {});

  int num_nodes() const override { return rail_.num_nodes(); }
  int node() const override { return rail_.node(); }
  DType wire() const override;
  DeviceHandle make_handle() const override;

  void plan(DeviceHandle& handle, std::span<const DeviceRoute> routes, cudaStream_t stream) const override;
  using DeviceExchange::dispatch;
  void dispatch(const DeviceHandle& handle, DType dtype, std::span<const DeviceRows> x, std::uint64_t window, const Scales& scales, bool after_plan,
                cudaStream_t stream) const override;
  void combine(const DeviceHandle& handle, std::uint64_t window, DType out_dtype, std::span<const DeviceRows> out, cudaStream_t stream,
               std::span<const void* const> base = {}) const override;
  void return_slot_values(const DeviceHandle& handle, std::span<const DeviceRoute> routes, std::span<const float* const> values,
                          std::span<float* const> d_weights, cudaStream_t stream) const override;
  void send_between_nodes(std::span<const void* const> send, std::span<void* const> receive, std::size_t bytes, cudaStream_t stream) const override;

  std::size_t handle_bytes() const override { return DeviceExchange::handle_bytes() + layout_.bytes; }
  void save(const DeviceHandle& handle, void* to, cudaStream_t stream) const override;
  void restore(DeviceHandle& handle, const void* from, std::int64_t T, cudaStream_t stream) const override;

 private:
  // Buffers of a rank: what it sends to and gets from each node, and the rows or sums of all its node's tokens.
  struct Rows {
    DeviceBuffer send, all, returned;
  };
  std::size_t part_rows() const { return static_cast<std::size_t>(group_.T_max); }
  NodeArgs args(const DeviceHandle& handle, std::size_t i) const;
  // Message of part m of `send` to part m of `receive` (parts of `bytes`) of every other node, for rank i; send_stride: bytes between parts of send.
  void add_messages(std::vector<RailMessage>& messages, std::size_t i, const void* send, void* receive, std::size_t bytes, std::size_t send_stride) const;
  void share_verdict(const DeviceHandle& handle, cudaStream_t stream) const;

  ExchangeConfig group_;
  Rail& rail_;
  int device_;
  NodePlan layout_;
  std::vector<Rows> rows_;
};

}  // namespace waybill::cuda
