// SPDX-License-Identifier: Apache-2.0
// The windows of one rank: memory of this process alone, or an arena that NCCL maps for the group's processes.
#pragma once

#include <algorithm>
#include <memory>
#include <string>

#include "fabric/cuda_local/cuda_local_kernels.h"
#include "fabric/cuda_local/rail.h"
#include "waybill/error.h"
#include "waybill/exchange.h"
#include "waybill/waybill_device.h"

namespace waybill::capi {

class ProcessMemory {
 public:
  virtual ~ProcessMemory() = default;
  virtual int size() const = 0;
  virtual int num_nodes() const { return 1; }
  virtual cuda::Rail* rail() { return nullptr; }  // between nodes; null or of one node where there is one
  virtual cuda::LocalRanks ranks() const = 0;
  virtual std::uint64_t window(const std::string& name, std::size_t bytes) = 0;  // collective
  virtual void everybody_is_ready() = 0;                                         // collective; before any kernel posts to a peer
  virtual std::string first_error() const = 0;                                   // waits for the device
};

// The caller's group on `device`, checked; size 1 where none is given. kUnsupported, with what is missing, where this machine has no such GPU.
wb_process_group checked_group(const wb_process_group* group, std::int32_t device);

// group: null = this process alone. may_have_nodes: ranks that do not reach each other's memory make nodes (by NVLink domain, or of as many ranks as
// WAYBILL_RANKS_PER_NODE says) instead of being refused.
std::unique_ptr<ProcessMemory> make_process_memory(int device, const wb_process_group* group, std::size_t arena_bytes, bool may_have_nodes = false);

// How many nodes P ranks are on is known when they have met: room for whichever it is. config: of an exchange or a layer.
template <class Config, class Bytes>
std::size_t most_bytes(const Config& config, int P, const Bytes& bytes_on) {
  std::size_t most = bytes_on(1);
  for (int nodes = 2; nodes <= P && config.hierarchy != Hierarchy::kFlat; ++nodes) {
    if (P % nodes != 0 || config.E % nodes != 0 || config.K > config.E / nodes) continue;  // refused, should it come to that
    try {
      most = std::max(most, bytes_on(nodes));
    } catch (const Error&) {  // as above
    }
  }
  return most;
}

// nccl_memory.cc, or no_nccl.cc in a build without NCCL's headers.
std::unique_ptr<ProcessMemory> make_nccl_memory(const wb_process_group& group, std::size_t arena_bytes, bool may_have_nodes);

}  // namespace waybill::capi
