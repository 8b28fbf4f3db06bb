// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda_local/cuda_local_fabric.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <set>

#include "core/cuda/cuda_error.h"
#include "fabric/cuda_local/local_ranks.h"
#include "fabric/threads/groups.h"

namespace waybill::cuda {

// What the ranks share. Written by one rank between two barriers, or by a rank for itself.
class CudaLocalWorld {
 public:
  CudaLocalWorld(int P, const CudaLocalOptions& options) : group(P, options.devices, options.arena_bytes, options.fabric.timeout) {
    for (int rank = 0; rank < P; ++rank) {
      const int device = group.device_of(rank);
      const DeviceGuard guard(device);
      streams.emplace_back(device);
      ready.emplace_back(false);
      if (devices.insert(device).second) leaders.push_back(rank), done.emplace_back(false);
    }
  }
  bool leads(int rank) const { return std::find(leaders.begin(), leaders.end(), rank) != leaders.end(); }
  std::size_t device_index(int device) const {
    std::size_t index = 0;
    while (group.device_of(leaders[index]) != device) ++index;
    return index;
  }

  CudaLocalGroup group;
  std::deque<CudaStream> streams;  // [P]
  std::deque<CudaEvent> ready;     // [P]: all that the rank has queued so far
  std::vector<int> leaders;        // the lowest rank of each GPU
  std::deque<CudaEvent> done;      // [leaders]: its launch
  std::uint64_t last_window = 0;
  std::string error;  // of the last window or synchronize
  ErrorCode error_code = ErrorCode::kInternal;

 private:
  std::set<int> devices;
};

namespace {

// Host or device memory on either side; done when it returns. Peer access is on, so the driver takes the direct way between GPUs.
void copy_any(void* to, const void* from, std::size_t bytes) {
  WB_TRY_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cudaStreamPerThread));
  WB_TRY_CUDA(cudaStreamSynchronize(cudaStreamPerThread));
}

bool is_device_memory(const void* p) {
  cudaPointerAttributes attributes{};
  if (p == nullptr || cudaPointerGetAttributes(&attributes, p) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

void copy_between_ranks(void* to, const void* from, std::size_t bytes) {
  if (is_device_memory(to) || is_device_memory(from)) {
    copy_any(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

CudaLocalFabric::CudaLocalFabric(std::shared_ptr<CudaLocalWorld> world, Fabric& host) : world_(std::move(world)), host_(host) {
  WB_TRY_CUDA(cudaSetDevice(device()));  // of this rank's thread
}
CudaLocalFabric::~CudaLocalFabric() { WB_TRY_CUDA_NOEXCEPT(cudaStreamSynchronize(stream())); }

int CudaLocalFabric::device() const { return world_->group.device_of(rank()); }
cudaStream_t CudaLocalFabric::stream() const { return world_->streams[static_cast<std::size_t>(rank())].get(); }
void* CudaLocalFabric::address(int rank, std::uint64_t offset) const { return world_->group.at<unsigned char>(rank, offset); }

std::unique_ptr<ExchangeRequest> CudaLocalFabric::all_to_all_start(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) {
  WB_TRY_CUDA(cudaStreamSynchronize(stream()));
  return host_.all_to_all_start(send, receive, phase);
}

std::uint64_t CudaLocalFabric::window(std::string_view name, std::size_t bytes) {
  std::int64_t sizes[2] = {static_cast<std::int64_t>(bytes), -static_cast<std::int64_t>(bytes)};
  host_.all_reduce(std::span<std::int64_t>(sizes), ReduceOp::kMax, fmt::format("window {}", name));  // the phase carries the name
  if (rank() == 0) {
    world_->error.clear();
    try {
      WB_CHECK(sizes[0] == -sizes[1], "window {} must have one size on all ranks, got {} to {} bytes", name, -sizes[1], sizes[0]);
      world_->last_window = world_->group.window(std::string(name), bytes);
    } catch (const Error& error) {
      world_->error = error.what(), world_->error_code = error.code();
    }
  }
  host_.barrier("window booked");
  const std::uint64_t offset = world_->last_window;
  const std::string error = world_->error;
  const ErrorCode code = world_->error_code;
  host_.barrier("window read");
  if (!error.empty()) WB_FAIL(code, "{}", error);
  return offset;
}

void CudaLocalFabric::launch_together(std::string_view phase, const Launch& launch) {
  const CudaEvent& own = world_->ready[static_cast<std::size_t>(rank())];
  own.record(stream());
  host_.barrier(phase);
  const std::size_t index = world_->device_index(device());
  if (world_->leads(rank())) {
    for (const int peer : world_->group.ranks_on(device())) {
      if (peer != rank()) world_->ready[static_cast<std::size_t>(peer)].wait_on(stream());
    }
    launch(local_ranks(world_->group, device()), stream());
    world_->done[index].record(stream());
  }
  host_.barrier(phase);
  if (!world_->leads(rank())) world_->done[index].wait_on(stream());
  host_.barrier(phase);  // the events may be recorded again
}

void CudaLocalFabric::device_barrier(std::string_view phase, int phase_number, int ctas) {
  WB_CHECK(ctas >= 1 && ctas <= kMaxBarrierCtas, "a barrier has 1 to {} CTAs a rank, got {}", kMaxBarrierCtas, ctas);
  world_->group.check_co_residency(group_barrier_kernel(), kBarrierThreads, 0, ctas);
  launch_together(phase, [&](const LocalRanks& ranks, cudaStream_t stream) {
    launch_group_barrier_kernel(ranks, phase_number, ctas, stream);
    check_launch("group_barrier");
  });
}

void CudaLocalFabric::synchronize(std::string_view phase) {
  WB_TRY_CUDA(cudaStreamSynchronize(stream()));
  host_.barrier(phase);
  if (rank() == 0) {
    world_->error = world_->group.first_error();
    if (!world_->error.empty()) world_->group.clear_errors();
  }
  host_.barrier(phase);
  const std::string error = world_->error;
  host_.barrier(phase);
  if (!error.empty()) WB_FAIL(ErrorCode::kTimeout, "a wait on the device ran out ({}): {}", phase, error);
}

void run_cuda_ranks(int P, const std::function<void(CudaLocalFabric&)>& body, const CudaLocalOptions& options) {
  WB_CHECK(options.fabric.timeout.count() > 0, "the fabric's timeout must be positive, got {} ms", options.fabric.timeout.count());
  const auto world = std::make_shared<CudaLocalWorld>(P, options);
  threads::run_ranks(
      P,
      [&](Fabric& host) {
        CudaLocalFabric fabric(world, host);
        body(fabric);
      },
      options.fabric, copy_between_ranks);
}

}  // namespace waybill::cuda
