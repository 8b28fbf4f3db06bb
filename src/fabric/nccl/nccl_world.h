// SPDX-License-Identifier: Apache-2.0
// The nccl engine: one process a GPU. One arena a process, allocated by NCCL and registered once as a symmetric window (multicast off), gives
// kernels the same DevPeers table that cuda_local gives them; barriers and signals are ours, so NCCL is not in the hot path. Host collectives
// go over NCCL send and receive (host_fabric()).
// Ranks that do not reach each other's memory are refused, unless NcclOptions::ranks_per_node says that the group has nodes: then windows and
// peer tables are those of a rank's node, and rail() carries bytes between nodes. A thread of such a world watches over its messages (nccl_watch.h).
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "core/cuda/device_buffer.h"
#include "core/cuda/pinned_buffer.h"
#include "fabric/cuda_local/cuda_local_kernels.h"
#include "fabric/cuda_local/rail.h"
#include "fabric/nccl/nccl_comm.h"
#include "fabric/nccl/nccl_library.h"
#include "fabric/nccl/nccl_lifeline.h"
#include "fabric/nccl/nccl_rendezvous.h"
#include "fabric/nccl/nccl_watch.h"
#include "waybill/fabric.h"

namespace waybill::cuda {

inline constexpr int kOneNode = 0, kNodesByTopology = -1;

struct NcclOptions {
  std::size_t arena_bytes = std::size_t{1} << 20;  // for all windows; the same on every rank
  std::chrono::milliseconds timeout{60000};        // of host collectives, of steps, of waits inside kernels and of messages that the device has come to
  // kOneNode; kNodesByTopology: a node is what shares an NVLink domain, equally many ranks each, one behind the other; or their number, to force nodes.
  int ranks_per_node = kOneNode;
  // Of what the constructor waits for: processes that come late, NCCL's start, their first exchange. At least `timeout`.
  std::chrono::milliseconds start_timeout{60000};
};

class NcclWorld {
 public:
  // Collective over all processes of `self`; one that does not come, or ends on the way, is an error on every other within start_timeout. Takes GPU
  // local_rank of this process. Set CUDA_MODULE_LOADING=EAGER before CUDA starts: loading a
  // kernel at its first launch would wait for a peer that waits for it.
  explicit NcclWorld(const NcclOptions& options, const ProcessRank& self = process_rank());
  ~NcclWorld();  // waits for the device, several nodes: no longer than `timeout`; as abandon() where a rank is lost
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  int rank() const { return self_.rank; }
  int size() const { return self_.size; }
  int ranks_per_node() const { return peers_.size; }
  int num_nodes() const { return self_.size / peers_.size; }
  int node() const { return self_.rank / peers_.size; }
  // Of the group: valid as long as this. Owned by it.
  Rail& rail() { return *rail_; }
  int device() const { return device_; }
  Fabric& host_fabric() { return *fabric_; }

  // Collective: books `bytes` at one offset of every arena. Another size on some rank is refused on every rank; kOutOfMemory when it is full.
  std::uint64_t window(const std::string& name, std::size_t bytes);
  template <class T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(arena_) + offset);
  }
  LocalRanks local_ranks() const;  // this rank alone, with the table of its node

  // Several nodes: when a rank is lost, or messages take longer than NcclOptions::timeout, the world's thread gives the group up by itself: every stream is
  // free again, however it is waited for (its results are worthless; exchanges on it are invalid and have kStatusTimeout in their status word), rail() and
  // host_fabric() refuse, and abandon() is what is left; graphs that hold messages must be destroyed. check() then throws, on every rank: kPeerFailed naming
  // node and rank of a process that has ended, or that others gave up because it does not answer or has not come; kTimeout on the rank that found out, naming
  // who is late. One atomic load where nothing is lost. One node: does nothing, kernels have timeouts of their own.
  void check(const char* what) const { watch_->throw_if_lost(what); }
  // Waits for what `stream` holds and throws as check(): as soon as it is known, and kTimeout as well where `what` takes longer than NcclOptions::timeout for
  // another reason. One node: cudaStreamSynchronize.
  void synchronize(cudaStream_t stream, const char* what);

  // As CudaLocalGroup: of this rank. clear_errors() is collective, with no kernel running anywhere.
  std::string first_error() const;
  void clear_errors();

  // After a peer was lost: leaves without waiting for it. Host collectives and the rail refuse from then on.
  void abandon() noexcept;

 private:
  template <class Call>
  void start(const char* what, Call call);
  void start_nccl(const ncclUniqueId& id);
  ncclWindow_t register_arena(ncclComm_t comm);
  int choose_nodes(int wanted);
  void map_arena(int ranks_per_node);
  void await(cudaStream_t stream, const char* what, std::chrono::nanoseconds timeout, bool has_results);
  void poison() noexcept;
  void leave() noexcept;
  [[noreturn]] void refuse(cudaStream_t stream, const char* what, ncclResult_t error);
  [[noreturn]] void end_of(cudaStream_t stream, const char* what);

  ProcessRank self_;
  int device_;
  NcclComm comm_;
  ncclComm_t node_comm_ = nullptr;  // where there are several nodes
  ncclWindow_t window_ = nullptr;
  void* arena_ = nullptr;
  std::size_t arena_bytes_, used_;
  std::chrono::nanoseconds timeout_, start_timeout_;
  DevPeers peers_{};
  CudaStream side_;                     // reaches the arena while kernels wait
  PinnedBuffer progress_;               // RailProgress
  std::unique_ptr<Lifeline> lifeline_;  // several nodes
  std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<Rail> rail_;
  bool has_left_ = false;
  std::unique_ptr<NcclWatch> watch_;  // its thread reads what is above
};

}  // namespace waybill::cuda
