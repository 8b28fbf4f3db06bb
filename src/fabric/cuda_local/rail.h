// SPDX-License-Identifier: Apache-2.0
// Bytes between nodes: what a two-level exchange of GPUs stands on. Ranks lie node by node, ranks_per_node() on each; rank i of a node talks to
// rank i of the other nodes only (its rail).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

namespace waybill::cuda {

struct RailMessage {
  int index;         // of the sending and receiving rank in its node
  int node;          // the other one
  const void* send;  // device memory
  void* receive;
  std::size_t bytes;  // of both; the same there
};

class Rail {
 public:
  virtual ~Rail() = default;
  virtual int num_nodes() const = 0;
  virtual int node() const = 0;
  virtual int ranks_per_node() const = 0;
  // Queues all messages on `stream`, both ways. Every rank of the rail makes the same calls with the same sizes in the same order. What was queued
  // before is sent; the messages are there for what is queued behind.
  virtual void exchange(std::span<const RailMessage> messages, cudaStream_t stream) = 0;
};

}  // namespace waybill::cuda
