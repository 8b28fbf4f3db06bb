// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda_local/cuda_local.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/cuda/cuda_error.h"
#include "fabric/cuda_local/peer_access.h"

namespace waybill::cuda {
namespace {

constexpr std::uint64_t kAlignment = 256;
std::uint64_t aligned(std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

CudaLocalGroup::CudaLocalGroup(int P, std::span<const int> devices, std::size_t arena_bytes, std::chrono::milliseconds timeout)
    : arena_bytes_(aligned(sizeof(DeviceControl)) + aligned(arena_bytes)),
      used_(aligned(sizeof(DeviceControl))),
      timeout_ns_(static_cast<std::uint64_t>(timeout.count()) * 1000000u) {
  WB_CHECK(P >= 1 && P <= kMaxDevicePeers, "a group has 1 to {} ranks, got P = {}", kMaxDevicePeers, P);
  const int G = static_cast<int>(devices.size());
  WB_CHECK(G >= 1 && G <= P, "{} ranks need 1 to {} GPUs, got {}", P, P, G);
  WB_CHECK(timeout.count() > 0, "the timeout must be positive, got {} ms", timeout.count());
  check_peer_access(devices);
  for (const int a : devices) {
    for (const int b : devices) {
      if (a != b) enable_peer_access(a, b);
    }
  }
  for (int rank = 0; rank < P; ++rank) {
    device_of_.push_back(devices[static_cast<std::size_t>(rank * G / P)]);
    arenas_.emplace_back(arena_bytes_, device_of_.back());
  }
  clear_errors();
}

std::vector<int> CudaLocalGroup::ranks_on(int device) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size(); ++rank) {
    if (device_of(rank) == device) ranks.push_back(rank);
  }
  return ranks;
}

std::uint64_t CudaLocalGroup::window(std::string name, std::size_t bytes) {
  const std::uint64_t offset = used_;
  if (bytes > arena_bytes_ || offset + aligned(bytes) > arena_bytes_) {
    WB_FAIL(ErrorCode::kOutOfMemory, "window {} of {} bytes does not fit: {} of {} bytes of the arena are taken", name, bytes, used_, arena_bytes_);
  }
  used_ += aligned(bytes);
  windows_.push_back(Window{std::move(name), offset, bytes});
  return offset;
}

DevPeers CudaLocalGroup::peers(int rank) const {
  WB_CHECK(rank >= 0 && rank < size(), "rank {} of a group of {}", rank, size());
  DevPeers p{};
  for (int peer = 0; peer < size(); ++peer) p.base[peer] = arenas_[static_cast<std::size_t>(peer)].as<unsigned char>();
  p.rank = rank, p.size = size(), p.timeout_ns = timeout_ns_;
  return p;
}

std::vector<DevPeers> CudaLocalGroup::all_peers() const {
  std::vector<DevPeers> all;
  for (int rank = 0; rank < size(); ++rank) all.push_back(peers(rank));
  return all;
}

DeviceWaitError CudaLocalGroup::error(int rank) const {
  const DeviceGuard guard(device_of(rank));
  DeviceWaitError error{};
  WB_TRY_CUDA(cudaDeviceSynchronize());
  WB_TRY_CUDA(cudaMemcpy(&error, &at<DeviceControl>(rank, 0)->error, sizeof(error), cudaMemcpyDeviceToHost));
  return error;
}

std::string CudaLocalGroup::first_error() const {
  for (const std::uint32_t state : {1u, 2u}) {  // ranks that timed out themselves say more than poisoned ones
    for (int rank = 0; rank < size(); ++rank) {
      const DeviceWaitError e = error(rank);
      if (e.state == state) return fmt::format("phase {}: rank {} waited for rank {}, expected {}, saw {}", e.phase, e.rank, e.peer, e.expected, e.seen);
    }
  }
  return {};
}

void CudaLocalGroup::clear_errors() {
  for (int rank = 0; rank < size(); ++rank) {
    const DeviceGuard guard(device_of(rank));
    WB_TRY_CUDA(cudaDeviceSynchronize());
    WB_TRY_CUDA(cudaMemset(at<void*>(rank, 0), 0, sizeof(DeviceControl)));
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
}

void CudaLocalGroup::check_co_residency(const void* kernel, int threads, std::size_t dynamic_smem, int ctas) const {
  for (const int device : std::set<int>(device_of_.begin(), device_of_.end())) {
    const DeviceGuard guard(device);
    int blocks = 0, num_sms = 0;
    WB_TRY_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, dynamic_smem));
    WB_TRY_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const auto ranks = static_cast<int>(ranks_on(device).size());
    WB_CHECK(ctas * ranks <= blocks * num_sms, "{} ranks x {} CTAs wait for each other on cuda:{}, which holds {} at a time", ranks, ctas, device,
             blocks * num_sms);
  }
}

}  // namespace waybill::cuda
