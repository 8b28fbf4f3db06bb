// SPDX-License-Identifier: Apache-2.0
// The windows of one rank: memory of this process alone, an arena among those of a group within this process, or one that NCCL maps for the group's
// processes.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "capi/guard.h"
#include "core/cuda/device_buffer.h"
#include "exchange/cuda/tuning.h"
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
  // Before a call queues its first work. Within one process the first calls of all ranks wait for each other on the host, unless they are captured.
  virtual void meet(cudaStream_t) {}
  virtual bool is_local_group() const { return false; }
  virtual int ranks_on_device() const { return 1; }  // of this process, launched one by one
  // kPeerFailed or kTimeout, naming the rank, once the group has lost one; does not wait. What every call of a handle does first.
  virtual void check(const char* what) const { (void)what; }
};

// The caller's group on `device`, checked; size 1 where none is given. kUnsupported, with what is missing, where this machine has no such GPU.
wb_process_group checked_group(const wb_process_group* group, std::int32_t device);

// group: null = this process alone. may_have_nodes: ranks that do not reach each other's memory make nodes (by NVLink domain, or of as many ranks as
// WAYBILL_RANKS_PER_NODE says) instead of being refused.
std::unique_ptr<ProcessMemory> make_process_memory(int device, const wb_process_group* group, std::size_t arena_bytes, bool may_have_nodes = false);

// The longest wait of a rank for another of its group within this process, on the host and in kernels. Tests shorten it before they make a group.
std::chrono::milliseconds& local_timeout();

// One for each rank of a group within this process, rank r on devices[r]; they are given in rank order to handles that book the same windows. All devices are
// checked first.
std::vector<std::unique_ptr<ProcessMemory>> make_local_memory(std::span<const std::int32_t> devices, std::size_t arena_bytes);

// The handles of a group within this process, made one behind the other: make(device, memory) of each rank. arena_bytes(P) is asked when P is right.
template <class Handle, class ArenaBytes, class Make>
void make_local_ranks(std::int32_t P, const std::int32_t* devices, Handle** handles, const ArenaBytes& arena_bytes, const Make& make) {
  WB_CHECK(P >= 1 && P <= cuda::kMaxDevicePeers, "a group within one process has 1 to {} ranks, got P = {}", cuda::kMaxDevicePeers, P);
  (void)required(devices, "devices"), (void)required(handles, "handles");
  std::vector<std::unique_ptr<ProcessMemory>> memory = make_local_memory({devices, static_cast<std::size_t>(P)}, arena_bytes(P));
  std::vector<std::unique_ptr<Handle>> made;
  for (std::size_t rank = 0; rank < memory.size(); ++rank) {
    const cuda::DeviceGuard guard(devices[rank]);
    made.push_back(make(devices[rank], std::move(memory[rank])));
  }
  for (std::size_t rank = 0; rank < made.size(); ++rank) handles[rank] = made[rank].release();
}

// Ranks that are launched one by one on one GPU wait for each other there: launches small enough that those of all `ranks` fit on it. Speed only.
cuda::ExchangeTuning tuning_beside(int ranks);

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
