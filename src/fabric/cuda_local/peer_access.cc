// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda_local/peer_access.h"

#include <mutex>
#include <set>
#include <utility>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"

namespace waybill::cuda {
namespace {

// Pairs that this process has switched on: asking CUDA again is an error of its own, which tools report.
bool first_request(int device, int peer) {
  static std::mutex mutex;
  static std::set<std::pair<int, int>> pairs;
  const std::lock_guard<std::mutex> lock(mutex);
  return pairs.emplace(device, peer).second;
}

}  // namespace

bool can_access_peer(int device, int peer) {
  int can_access = 0;
  WB_TRY_CUDA(cudaDeviceCanAccessPeer(&can_access, device, peer));
  return can_access == 1;
}

void check_peer_access(std::span<const int> devices, const CanAccessPeer& can_access) {
  for (const int a : devices) {
    for (const int b : devices) {
      WB_CHECK(a == b || can_access(a, b), "cuda:{} cannot reach the memory of cuda:{}; cuda_local needs peer access between all its GPUs", a, b);
    }
  }
}

void enable_peer_access(int device, int peer) {
  if (!first_request(device, peer)) return;
  const DeviceGuard guard(device);
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {  // by someone else in this process
    (void)cudaGetLastError();
    return;
  }
  WB_TRY_CUDA(error);
}

}  // namespace waybill::cuda
