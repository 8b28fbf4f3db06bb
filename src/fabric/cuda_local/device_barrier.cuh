// SPDX-License-Identifier: Apache-2.0
// Barrier among the CTAs with one index on every rank of a group.
//
// Contract: every rank's CTA `cta` calls it the same number of times with all its threads; all CTAs of all ranks are resident. What a
// rank wrote before is visible to every rank after. Epochs live in device memory, one word a (CTA, source rank): a replayed graph
// goes on where the last one ended, and a fast rank that is one barrier ahead only writes a larger epoch.
// Worked example, P = 2, first barrier: both write 1 to the other's flag[cta][own rank], wait for flag[cta][peer] >= 1, epoch = 1.
//
// A wait that takes longer than timeout_ns, or finds this rank poisoned, records the error once, poisons every peer and returns false:
// the caller must leave the kernel. No trap: peers end by their own poll, the host reads which rank was late.
#pragma once

#include "core/cuda/ptx.cuh"
#include "fabric/cuda_local/device_peers.h"

namespace waybill::cuda {

__device__ __forceinline__ void record_wait_error(const DevPeers& p, int rank, std::uint32_t state, int phase, int peer, std::uint32_t expected,
                                                  std::uint32_t seen) {
  DeviceWaitError& error = p.control(rank)->error;
  if (atomicCAS(&error.state, 0u, state) != 0u) return;
  error.phase = phase, error.rank = rank, error.peer = peer, error.expected = expected, error.seen = seen;
  for (int other = 0; state == 1 && other < p.size; ++other) ptx::st_release_sys(&p.control(other)->poison, 1u);
}

// True when flag reaches `expected`. `rank` waits; p.rank is not read, so that one table serves all ranks of a launch. waited_ns: 0 where the first look
// found it.
__device__ __forceinline__ bool wait_for_peer(const DevPeers& p, int rank, const std::uint32_t* flag, std::uint32_t expected, int peer, int phase,
                                              std::uint64_t& waited_ns) {
  waited_ns = 0;
  if (static_cast<std::int32_t>(ptx::ld_acquire_sys(flag) - expected) >= 0) return true;
  const std::uint64_t begin = ptx::global_timer_ns();
  for (std::uint32_t spins = 1;; ++spins) {
    const std::uint32_t seen = ptx::ld_acquire_sys(flag);
    if (static_cast<std::int32_t>(seen - expected) >= 0) {
      waited_ns = ptx::global_timer_ns() - begin;
      return true;
    }
    if ((spins & 63u) != 0) continue;
    const std::uint64_t now = ptx::global_timer_ns();
    const bool poisoned = ptx::ld_acquire_sys(&p.control(rank)->poison) != 0;
    if (!poisoned && now - begin < p.timeout_ns) continue;
    record_wait_error(p, rank, poisoned ? 2u : 1u, phase, peer, expected, seen);
    return false;
  }
}

__device__ __forceinline__ bool wait_for_peer(const DevPeers& p, int rank, const std::uint32_t* flag, std::uint32_t expected, int peer, int phase) {
  std::uint64_t ignored;
  return wait_for_peer(p, rank, flag, expected, peer, phase, ignored);
}

__device__ __forceinline__ bool device_barrier(const DevPeers& p, int cta, int phase) {
  DeviceControl* own = p.control(p.rank);
  __syncthreads();  // the CTA's writes are ordered before the fences below
  const std::uint32_t expected = own->epoch[cta] + 1;
  bool ok = true;
  for (int peer = static_cast<int>(threadIdx.x); peer < p.size; peer += static_cast<int>(blockDim.x)) {
    ptx::fence_acq_rel_sys();
    ptx::st_release_sys(&p.control(peer)->flag[cta][p.rank], expected);
  }
  for (int peer = static_cast<int>(threadIdx.x); peer < p.size && ok; peer += static_cast<int>(blockDim.x)) {
    ok = wait_for_peer(p, p.rank, &own->flag[cta][peer], expected, peer, phase);
  }
  ok = __syncthreads_and(ok ? 1 : 0) != 0;
  if (threadIdx.x == 0) own->epoch[cta] = expected;
  __syncthreads();
  return ok;
}

}  // namespace waybill::cuda
