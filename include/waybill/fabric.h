// SPDX-License-Identifier: Apache-2.0
// Fabric: the ranks of a group and how they talk. One object per rank; collective calls are made by every rank in one order.
// Engines: threads (ranks are threads of this process), mpi (processes), caller (the caller's own transport), cuda_local (virtual ranks on the GPUs of one
// process, in CUDA builds: src/fabric/cuda_local/cuda_local_fabric.h); nccl (one process a GPU; windows of one NVLink domain: src/fabric/nccl/nccl_world.h, its
// host side is the caller engine over NCCL). Every wait has a timeout that names rank, peer, phase, expected and seen.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/tensor.h"

namespace waybill {

enum class ReduceOp : std::uint8_t { kSum = 0, kMax = 1, kMin = 2 };

struct FabricOptions {
  std::chrono::milliseconds timeout{60000};
  // Forces Topology::node_of = rank / ranks_per_node (the last node may be smaller), so that one machine can play several nodes.
  // 0: the engine's own view (threads: one node; mpi: by host name).
  int ranks_per_node = 0;
};

// Where the ranks sit. domain: ranks that reach each other's memory (one NVLink domain, one process). node: one host.
struct Topology {
  std::vector<int> node_of;    // [P]
  std::vector<int> domain_of;  // [P]
};

// A pending exchange; wait() must be called before the buffers are reused. Several may be pending and may be waited for in any
// order. Destroying it waits; during an exception it withdraws instead, which fails the group. Do not outlive the Fabric.
class WB_API ExchangeRequest {
 public:
  virtual ~ExchangeRequest() = default;
  virtual void wait() = 0;
};

// Rules of every engine:
// - Every rank calls the same collectives in the same order with the same `phase`. A rank that calls another one, or with another
//   size, is named in a kInvalidArgument on every rank of the group; no data is exchanged by that call.
// - A wait that runs out throws kTimeout naming rank, missing peers, phase, expected and seen, and fails the group. A group that
//   has failed stays failed: pending and later calls of the peers throw kPeerFailed with the first reason. A rank that leaves
//   (its Fabric is destroyed) fails the peers that still wait for it.
// - One thread per rank calls; calls of different groups may overlap, in one order on all ranks.
class WB_API Fabric {
 public:
  virtual ~Fabric() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const char* engine() const = 0;
  virtual const Topology& topology() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;

  virtual void barrier(std::string_view phase) = 0;

  // Every rank gives `bytes_per_rank` bytes and receives all of them in rank order. Host memory, small.
  virtual void all_gather(const void* send, void* receive, std::size_t bytes_per_rank, std::string_view phase) = 0;

  // Variable all-to-all on host memory: send[p] goes to rank p, receive[p] comes from rank p. Sizes must match on both sides
  // (checked). Ranks with nothing to send take part.
  struct Span {
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  virtual std::unique_ptr<ExchangeRequest> all_to_all_start(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) = 0;
  void all_to_all(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) { all_to_all_start(send, receive, phase)->wait(); }

  // Elementwise over ranks, in rank order (bit-equal on every rank and every repeat). In place.
  virtual void all_reduce(std::span<float> values, ReduceOp op, std::string_view phase) = 0;
  virtual void all_reduce(std::span<double> values, ReduceOp op, std::string_view phase) = 0;
  virtual void all_reduce(std::span<std::int64_t> values, ReduceOp op, std::string_view phase) = 0;
  virtual void broadcast(void* data, std::size_t bytes, int root, std::string_view phase) = 0;

  // Ranks with the same colour form a new group, ordered by (key, rank). Collective. colour < 0: this rank gets null.
  // The groups fail on their own, but a failure of this group also fails those split from it.
  virtual std::unique_ptr<Fabric> split(int colour, int key, std::string_view name) = 0;

  // Tells every rank of the group that this one has failed: their pending and later calls throw kPeerFailed with `reason`.
  virtual void abort(const std::string& reason) noexcept = 0;
};

// A group of one rank; every collective is a copy.
WB_API std::unique_ptr<Fabric> make_single_fabric();

// The threads engine: runs body(fabric) on P threads and returns when all have ended. If a body throws, the others are woken
// with kPeerFailed and the first error is rethrown here as an Error of the same code with "rank R: " before its text (other
// std::exceptions become kInternal; anything else is rethrown as it is). Not nested: a body may call run_ranks for a new world.
WB_API void run_ranks(int P, const std::function<void(Fabric&)>& body, const FabricOptions& options = {});

// The same engine for threads of the caller: element r is rank r's end, to be used and destroyed by one thread. The group's state
// lives until the last of them is gone.
WB_API std::vector<std::unique_ptr<Fabric>> make_thread_group(int P, const FabricOptions& options = {});

// The caller's way to move bytes between the ranks of a group, for example a process group of a framework.
class WB_API FabricTransport {
 public:
  virtual ~FabricTransport() = default;
  // send holds send_bytes[p] bytes for rank p, in rank order; receive likewise. Own rank: 0 bytes. Called by every rank in one order;
  // returns when the bytes have moved. Throws Error where they cannot: the group has failed then. Limits its own waits.
  virtual void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive, std::span<const std::int64_t> receive_bytes) = 0;
};
// The caller engine: every collective on top of the transport, with the checks of the other engines. It cannot be split; options.timeout
// is only reported, and a rank that leaves is seen by the transport.
WB_API std::unique_ptr<Fabric> make_caller_fabric(std::unique_ptr<FabricTransport> transport, int P, int rank, const FabricOptions& options = {});

}  // namespace waybill
