// SPDX-License-Identifier: Apache-2.0
// The cuda_local engine behind Fabric: P virtual ranks of one process, each a host thread with a stream, on 1 to G GPUs that reach each
// other's memory.
//
// all_to_all takes host or device memory on either side (mixed, too): it waits for this rank's stream first, and the bytes are there
// when its wait returns. The other collectives take host memory, as in every engine. Failures, timeouts and the order of sums are
// those of the threads engine, which carries the host side.
// Device side: windows in every rank's arena, barriers with epochs in device memory. Ranks that share a GPU must be resident together
// to wait for each other, so a kernel in which ranks meet is launched once a GPU for all of its ranks: launch_together().
#pragma once

#include <functional>
#include <memory>

#include "fabric/cuda_local/cuda_local.h"
#include "fabric/cuda_local/cuda_local_kernels.h"
#include "waybill/fabric.h"

namespace waybill::cuda {

struct CudaLocalOptions {
  std::vector<int> devices{0};                     // rank r lives on devices[r * G / P]
  std::size_t arena_bytes = std::size_t{1} << 20;  // per rank, for all windows
  FabricOptions fabric{};                          // timeout: of host waits and of waits inside kernels
};

class CudaLocalWorld;

class CudaLocalFabric final : public Fabric {
 public:
  CudaLocalFabric(std::shared_ptr<CudaLocalWorld> world, Fabric& host);
  ~CudaLocalFabric() override;

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  const char* engine() const override { return "cuda_local"; }
  const Topology& topology() const override { return host_.topology(); }
  std::chrono::milliseconds timeout() const override { return host_.timeout(); }
  void barrier(std::string_view phase) override { host_.barrier(phase); }
  void all_gather(const void* send, void* receive, std::size_t bytes_per_rank, std::string_view phase) override {
    host_.all_gather(send, receive, bytes_per_rank, phase);
  }
  std::unique_ptr<ExchangeRequest> all_to_all_start(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) override;
  void all_reduce(std::span<float> values, ReduceOp op, std::string_view phase) override { host_.all_reduce(values, op, phase); }
  void all_reduce(std::span<double> values, ReduceOp op, std::string_view phase) override { host_.all_reduce(values, op, phase); }
  void all_reduce(std::span<std::int64_t> values, ReduceOp op, std::string_view phase) override { host_.all_reduce(values, op, phase); }
  void broadcast(void* data, std::size_t bytes, int root, std::string_view phase) override { host_.broadcast(data, bytes, root, phase); }
  // Groups of host collectives: their all_to_all takes device memory after the caller has synchronised; windows belong to the world.
  std::unique_ptr<Fabric> split(int colour, int key, std::string_view name) override { return host_.split(colour, key, name); }
  void abort(const std::string& reason) noexcept override { host_.abort(reason); }

  int device() const;
  cudaStream_t stream() const;  // this rank's own

  // Collective: books `bytes` at one offset of every arena. Every rank must give the same name and size (kInvalidArgument otherwise);
  // kOutOfMemory on every rank when the arenas are full.
  std::uint64_t window(std::string_view name, std::size_t bytes);
  template <class T>
  T* at(int rank, std::uint64_t offset) const {
    return static_cast<T*>(address(rank, offset));
  }

  // Collective: the lowest rank of each GPU calls launch(its ranks, stream) once all ranks have come; what it queues runs after all
  // that the ranks of the GPU have queued on their streams, and before what they queue later. A throw of any launch fails all ranks.
  using Launch = std::function<void(const LocalRanks& ranks, cudaStream_t stream)>;
  void launch_together(std::string_view phase, const Launch& launch);
  // Collective, on the device: what any rank's stream did before is visible to what any rank's stream does after. `phase_number` shows
  // in errors of waits inside kernels.
  void device_barrier(std::string_view phase, int phase_number, int ctas = 1);
  // Collective: waits for this rank's stream. A wait inside a kernel that ran out throws kTimeout with ranks, phase, expected and seen
  // on every rank; the flags are then clear again, so that the group may go on.
  void synchronize(std::string_view phase);

 private:
  void* address(int rank, std::uint64_t offset) const;
  std::shared_ptr<CudaLocalWorld> world_;
  Fabric& host_;
};

// Runs body on P ranks; errors as run_ranks(). Refuses what CudaLocalGroup refuses, before a thread starts.
void run_cuda_ranks(int P, const std::function<void(CudaLocalFabric&)>& body, const CudaLocalOptions& options = {});

}  // namespace waybill::cuda
