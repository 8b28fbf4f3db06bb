// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <memory>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "fabric/cuda_local/rail.h"

namespace waybill::cuda {

// Rails between virtual nodes of one process, a host thread each. Not for capture.
class LocalRails {
 public:
  LocalRails(int nodes, int ranks_per_node, int device)
      : nodes_(nodes), per_node_(ranks_per_node), messages_(static_cast<std::size_t>(nodes)), barrier_(nodes) {
    const DeviceGuard guard(device);
    for (int n = 0; n < 2 * nodes; ++n) events_.push_back(std::make_unique<CudaEvent>(false));
  }
  class Node final : public Rail {
   public:
    Node(LocalRails& all, int node) : all_(all), node_(node) {}
    int num_nodes() const override { return all_.nodes_; }
    int node() const override { return node_; }
    int ranks_per_node() const override { return all_.per_node_; }
    void exchange(std::span<const RailMessage> messages, cudaStream_t stream) override {
      const auto self = static_cast<std::size_t>(node_), nodes = static_cast<std::size_t>(all_.nodes_);
      all_.messages_[self].assign(messages.begin(), messages.end());
      all_.events_[self]->record(stream);
      all_.barrier_.arrive_and_wait();
      std::vector<std::size_t> taken(nodes * static_cast<std::size_t>(all_.per_node_));  // messages of (node, index) that are copied
      for (const RailMessage& m : messages) {
        all_.events_[static_cast<std::size_t>(m.node)]->wait_on(stream);
        std::size_t& next = taken[static_cast<std::size_t>(m.node * all_.per_node_ + m.index)];
        std::size_t seen = 0;
        for (const RailMessage& theirs : all_.messages_[static_cast<std::size_t>(m.node)]) {
          if (theirs.node != node_ || theirs.index != m.index || seen++ != next) continue;
          EXPECT_EQ(theirs.bytes, m.bytes);
          WB_TRY_CUDA(cudaMemcpyAsync(m.receive, theirs.send, m.bytes, cudaMemcpyDeviceToDevice, stream));
        }
        ++next;
      }
      all_.events_[nodes + self]->record(stream);
      all_.barrier_.arrive_and_wait();
      for (std::size_t n = 0; n < nodes; ++n) all_.events_[nodes + n]->wait_on(stream);  // nobody still reads what this node sends
      all_.barrier_.arrive_and_wait();
    }

   private:
    LocalRails& all_;
    int node_;
  };

 private:
  int nodes_, per_node_;
  std::vector<std::vector<RailMessage>> messages_;
  std::vector<std::unique_ptr<CudaEvent>> events_;
  std::barrier<> barrier_;
};

}  // namespace waybill::cuda
