// SPDX-License-Identifier: Apache-2.0
// What a kernel knows about the ranks of its group: plain data, passed by value. The same table serves virtual ranks on one GPU,
// GPUs of one process and windows of other processes; kernels never ask which.
#pragma once

#include <cstdint>

namespace waybill::cuda {

inline constexpr int kMaxDevicePeers = 72;
inline constexpr int kMaxBarrierCtas = 132;

// The first thing a wait on this rank found wrong; sticky until the host clears it.
struct DeviceWaitError {
  std::uint32_t state;  // 0 = none, 1 = this rank timed out, 2 = a peer did and poisoned this rank
  std::int32_t phase, rank, peer;
  std::uint32_t expected, seen;
};

// At offset 0 of every rank's arena. Flags are written by peers, everything else by the rank itself, except poison.
struct DeviceControl {
  std::uint32_t flag[kMaxBarrierCtas][kMaxDevicePeers];  // [CTA][source rank]: the source's epoch
  std::uint32_t epoch[kMaxBarrierCtas];                  // barriers passed; lives here so that graphs replay
  std::uint32_t poison;                                  // set by a peer that gave up: leave every wait
  DeviceWaitError error;
};

struct DevPeers {
  unsigned char* base[kMaxDevicePeers];  // arena of each rank, all of one size, carved at the same offsets
  std::int32_t rank, size;
  std::uint64_t timeout_ns;

#if defined(__CUDACC__)
  __device__ __forceinline__ DeviceControl* control(int peer) const { return reinterpret_cast<DeviceControl*>(base[peer]); }
  template <class T>
  __device__ __forceinline__ T* at(int peer, std::uint64_t offset) const {
    return reinterpret_cast<T*>(base[peer] + offset);
  }
#endif
};

}  // namespace waybill::cuda
