// SPDX-License-Identifier: Apache-2.0
// The cuda_local engine: P virtual ranks on the GPUs of one process. One arena a rank, allocated and made visible to its peers once;
// windows are the same offsets in every arena. Kernels get DevPeers by value and synchronise with device_barrier(). Host-side
// collectives of such a group run on the threads engine (make_thread_group).
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/cuda/device_buffer.h"
#include "fabric/cuda_local/device_peers.h"

namespace waybill::cuda {

class CudaLocalGroup {
 public:
  // P ranks in order over `devices` (rank r on devices[r * G / P]). arena_bytes: per rank, for all windows; never grows.
  CudaLocalGroup(int P, std::span<const int> devices, std::size_t arena_bytes, std::chrono::milliseconds timeout = std::chrono::milliseconds(10000));

  int size() const { return static_cast<int>(arenas_.size()); }
  int device_of(int rank) const { return device_of_[static_cast<std::size_t>(rank)]; }
  std::vector<int> ranks_on(int device) const;

  // Books `bytes` at the same offset of every arena (256-byte aligned). kOutOfMemory naming demand and capacity when it is full.
  std::uint64_t window(std::string name, std::size_t bytes);
  template <class T>
  T* at(int rank, std::uint64_t offset) const {
    return reinterpret_cast<T*>(arenas_[static_cast<std::size_t>(rank)].as<unsigned char>() + offset);
  }
  DevPeers peers(int rank) const;
  std::vector<DevPeers> all_peers() const;

  // The first wait error of any rank, as text: "phase 3: rank 1 waited for rank 5, expected 2, saw 1"; empty = none. Waits for the
  // devices. clear_errors() also lowers the poison; flags and epochs are set to 0 on all ranks (no kernel may be running).
  std::string first_error() const;
  DeviceWaitError error(int rank) const;
  void clear_errors();

  // Throws when `ctas` CTAs a rank of `kernel` cannot all be resident on each device together: they would wait for ever.
  void check_co_residency(const void* kernel, int threads, std::size_t dynamic_smem, int ctas) const;

 private:
  struct Window {
    std::string name;
    std::uint64_t offset;
    std::size_t bytes;
  };
  std::vector<DeviceBuffer> arenas_;
  std::vector<int> device_of_;
  std::vector<Window> windows_;
  std::size_t arena_bytes_;
  std::uint64_t used_;
  std::uint64_t timeout_ns_;
};

// One barrier of all ranks by `ctas` CTAs each: queued on stream[d] for the d-th distinct device of the group.
void launch_group_barrier(const CudaLocalGroup& group, int phase, int ctas, std::span<const cudaStream_t> streams);

}  // namespace waybill::cuda
