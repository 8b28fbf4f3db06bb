// SPDX-License-Identifier: Apache-2.0
// Signals between ranks, and the CTA of a launch that comes last.
//
// Contract: post_signal() and await_signal() are called by all threads of a CTA. What the rank wrote before (ordered by last_cta() or by
// the end of an earlier kernel) is visible to a peer that has seen the signal. Epochs live in device memory and are moved by the last CTA
// of a kernel alone: open_epoch() gives every CTA of the launch the same value.
#pragma once

#include "core/cuda/ptx.cuh"
#include "exchange/cuda/exchange_params.h"
#include "fabric/cuda_local/device_barrier.cuh"

namespace waybill::cuda {

// Let the kernel behind this one start its CTAs, then wait for the one before.
__device__ __forceinline__ void begin_exchange_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ptx::launch_dependents();
  ptx::wait_for_dependencies();
#endif
}

__device__ __forceinline__ std::uint32_t open_epoch(const ExchangeParams& q, int rank, ExchangeSignal signal) {
  return ptx::ld_relaxed_gpu(&q.control(rank)->epoch[signal]) + 1;
}
__device__ __forceinline__ void close_epoch(const ExchangeParams& q, int rank, ExchangeSignal signal, std::uint32_t epoch) {
  if (threadIdx.x == 0) q.control(rank)->epoch[signal] = epoch;
}

__device__ __forceinline__ void post_signal(const ExchangeParams& q, int rank, ExchangeSignal signal, std::uint32_t epoch) {
  for (int peer = static_cast<int>(threadIdx.x); peer < q.shape.P; peer += static_cast<int>(blockDim.x)) {
    ptx::st_release_sys(&q.control(peer)->flag[signal][rank], epoch);  // releases what the CTA has seen, other CTAs' writes included
  }
}

// The counter of waits per peer. A launch's CTAs wait together, so one of them speaks for all: the first, or the last where it alone waits.
__device__ __forceinline__ void count_wait(const ExchangeParams& q, int rank, int peer, std::uint64_t waited_ns) {
  if (waited_ns != 0) atomicAdd(&q.control(rank)->wait_ns[peer], static_cast<unsigned long long>(waited_ns));
}

// True when every rank has posted `epoch`. False: the wait ran out or a peer gave up; the error is recorded. is_counted: this CTA's waits are.
__device__ __forceinline__ bool await_signal(const ExchangeParams& q, int rank, ExchangeSignal signal, std::uint32_t epoch, bool is_counted) {
  bool ok = true;
  for (int peer = static_cast<int>(threadIdx.x); peer < q.shape.P && ok; peer += static_cast<int>(blockDim.x)) {
    std::uint64_t waited_ns;
    ok = wait_for_peer(q.ranks.table, rank, &q.control(rank)->flag[signal][peer], epoch, peer, kExchangePhase + signal, waited_ns);
    if (is_counted) count_wait(q, rank, peer, waited_ns);
  }
  return __syncthreads_and(ok ? 1 : 0) != 0;
}

__device__ __forceinline__ bool await_signal(const ExchangeParams& q, int rank, ExchangeSignal signal, std::uint32_t epoch) {
  return await_signal(q, rank, signal, epoch, blockIdx.x == 0);
}

// A lost peer: the handle and the status word say so. Called by one thread.
__device__ __forceinline__ void record_lost(const ExchangeParams& q, int rank, const RankCall& call) {
  HandleHeader& header = *header_of(call);
  header.valid = header.R = header.S = header.S_padded = 0;  // nothing that did not arrive is ever read
  const DeviceWaitError& error = q.ranks.table.control(rank)->error;
  StatusWord& status = *call.status;
  if ((atomicOr(&status.flags, static_cast<std::uint32_t>(kStatusTimeout)) & kStatusTimeout) != 0) return;
  status.timeout_rank = error.rank, status.timeout_peer = error.peer, status.timeout_phase = error.phase;
  status.timeout_expected = error.expected, status.timeout_seen = error.seen;
}

__device__ __forceinline__ void mark_lost(const ExchangeParams& q, int rank, const RankCall& call) {
  if (threadIdx.x == 0) record_lost(q, rank, call);
}

// Chunks: `parts` more parts of chunk `chunk` for rank `to` (kChunkPartials) or for all others (kChunkRows, to = -1) are written. Called by a
// warp behind __syncwarp(); the warp that brings the `total` parts together tells the rank.
__device__ __forceinline__ void finish_chunk_parts(const ExchangeParams& q, int rank, ChunkKind kind, int to, int chunk, int parts, int total,
                                                   std::uint32_t epoch) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  std::uint32_t* done = &q.control(rank)->chunk_done[kind][to < 0 ? 0 : to][chunk];
  int is_last = 0;
  if (lane == 0) {
    is_last = ptx::atom_add_acq_rel_gpu(done, static_cast<std::uint32_t>(parts)) + static_cast<std::uint32_t>(parts) == static_cast<std::uint32_t>(total);
    if (is_last != 0) *done = 0;
  }
  is_last = __shfl_sync(ptx::kFullWarp, is_last, 0);
  __syncwarp();  // what lane 0 acquired is the warp's
  if (is_last == 0) return;
  for (int peer = to < 0 ? lane : to + lane; peer < (to < 0 ? q.shape.P : to + 1); peer += 32) {
    ptx::st_release_sys(&q.control(peer)->chunk_flag[kind][rank][chunk], epoch);
  }
}

// One lane: chunk `chunk` made by `maker` is there. False: as await_signal().
__device__ __forceinline__ bool await_chunk(const ExchangeParams& q, int rank, ChunkKind kind, int maker, int chunk, std::uint32_t epoch) {
  const std::uint32_t* flag = &q.control(rank)->chunk_flag[kind][maker][chunk];
  std::uint64_t waited_ns;
  const bool ok = wait_for_peer(q.ranks.table, rank, flag, epoch, maker, kExchangePhase + (kind == kChunkRows ? kSignalRows : kSignalPartials), waited_ns);
  if (blockIdx.x == 0 && threadIdx.x < 32) count_wait(q, rank, maker, waited_ns);
  return ok;
}

// True in the CTA of this rank's grid row that arrives last; what all the others wrote is then visible to it and, behind a signal, to peers
// (a release at system scope covers what the releasing CTA has acquired at GPU scope).
__device__ __forceinline__ bool last_cta(const ExchangeParams& q, int rank, ExchangeTicket ticket) {
  __shared__ int is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    std::uint32_t* word = &q.control(rank)->ticket[ticket];
    is_last = ptx::atom_add_acq_rel_gpu(word, 1u) == gridDim.x - 1 ? 1 : 0;
    if (is_last != 0) *word = 0;
  }
  __syncthreads();
  return is_last != 0;
}

// By the last CTA: post; then, where the end of the kernel means that the peers' data is here, wait for theirs.
__device__ __forceinline__ void post_only(const ExchangeParams& q, int rank, ExchangeSignal signal) {
  const std::uint32_t epoch = open_epoch(q, rank, signal);
  post_signal(q, rank, signal, epoch);
  __syncthreads();  // all have read the epoch
  close_epoch(q, rank, signal, epoch);
}
__device__ __forceinline__ void post_and_await(const ExchangeParams& q, int rank, const RankCall& call, ExchangeSignal signal) {
  const std::uint32_t epoch = open_epoch(q, rank, signal);
  post_signal(q, rank, signal, epoch);
  if (!await_signal(q, rank, signal, epoch, /*is_counted=*/true)) mark_lost(q, rank, call);
  close_epoch(q, rank, signal, epoch);
}
// In any kernel behind the one that posted: the peers' posts of the same epoch. Does not depend on which CTAs are resident.
__device__ __forceinline__ bool await_posted(const ExchangeParams& q, int rank, ExchangeSignal signal) {
  return await_signal(q, rank, signal, ptx::ld_relaxed_gpu(&q.control(rank)->epoch[signal]));
}

}  // namespace waybill::cuda
