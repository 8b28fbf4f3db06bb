// SPDX-License-Identifier: Apache-2.0
#include "capi/cuda/process_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "capi/convert.h"
#include "core/cuda/cuda_error.h"
#include "fabric/cuda_local/local_ranks.h"

namespace waybill::capi {
namespace {

// Before the first CUDA call of a handle, whose text would say less.
void check_gpu(std::int32_t device) {
  int count = 0, driver = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && device < count) return;
  (void)cudaGetLastError();
  if (error == cudaSuccess) WB_FAIL(ErrorCode::kInvalidArgument, "device is {}, this process sees {} GPUs; check CUDA_VISIBLE_DEVICES", device, count);
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    WB_FAIL(ErrorCode::kUnsupported, "this machine has no NVIDIA driver (libcuda.so.1 was not found), which the operations on GPUs need; install it");
  }
  WB_FAIL(ErrorCode::kUnsupported,
          "no GPU can be used: {} ({}); the driver supports CUDA {}.{}, this build has CUDA {}.{}; see nvidia-smi and CUDA_VISIBLE_DEVICES",
          cudaGetErrorString(error), cudaGetErrorName(error), driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

class OwnMemory final : public ProcessMemory {
 public:
  OwnMemory(int device, std::size_t bytes) : device_(device), group_(1, std::span<const int>(&device, 1), bytes) {}
  int size() const override { return 1; }
  cuda::LocalRanks ranks() const override { return cuda::local_ranks(group_, device_); }
  std::uint64_t window(const std::string& name, std::size_t bytes) override { return group_.window(name, bytes); }
  void everybody_is_ready() override {}
  std::string first_error() const override { return group_.first_error(); }

 private:
  int device_;
  cuda::CudaLocalGroup group_;
};

// Where the first calls of a group's ranks wait for each other. Until then a rank may allocate, load kernels or instantiate a graph, for which CUDA can wait
// for kernels of other GPUs, and these must not be ones that wait for this rank.
class FirstMeeting {
 public:
  explicit FirstMeeting(int P) : here_(static_cast<std::size_t>(P)) {}

  void come(int rank, cudaStream_t stream) {
    if (complete_.load(std::memory_order_acquire)) return;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    WB_TRY_CUDA(cudaStreamIsCapturing(stream, &capture));
    std::unique_lock lock(mutex_);
    if (!failure_.empty()) WB_FAIL(ErrorCode::kTimeout, "{}", failure_);
    here_[static_cast<std::size_t>(rank)] = true;
    const auto all_here = [this] { return std::find(here_.begin(), here_.end(), false) == here_.end(); };
    if (all_here()) complete_.store(true, std::memory_order_release), changed_.notify_all();
    if (capture != cudaStreamCaptureStatusNone) return;  // its graph is launched later
    changed_.wait_for(lock, local_timeout(), [&] { return all_here() || !failure_.empty(); });
    if (all_here()) return;
    if (failure_.empty()) {
      const auto missing = std::find(here_.begin(), here_.end(), false) - here_.begin();
      failure_ = fmt::format("rank {} of {} ranks of this process has made no call within {} ms of rank {}'s first", missing, here_.size(),
                             local_timeout().count(), rank);
      changed_.notify_all();
    }
    WB_FAIL(ErrorCode::kTimeout, "{}", failure_);
  }

 private:
  std::atomic<bool> complete_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> here_;
  std::string failure_;
};

// What the ranks of a group within this process share. They are made one behind the other by one thread.
struct LocalArenas {
  LocalArenas(std::span<const std::int32_t> on, std::size_t bytes)
      : devices(on.begin(), on.end()), group(static_cast<int>(on.size()), devices, bytes, local_timeout()), meeting(static_cast<int>(on.size())) {}
  struct Window {
    std::string name;
    std::size_t bytes;
    std::uint64_t offset;
  };
  std::vector<int> devices;
  cuda::CudaLocalGroup group;
  FirstMeeting meeting;
  std::vector<Window> windows;  // the first rank books them, the others find them
};

class LocalMemory final : public ProcessMemory {
 public:
  LocalMemory(std::shared_ptr<LocalArenas> arenas, int rank) : arenas_(std::move(arenas)), rank_(rank) {}
  int size() const override { return arenas_->group.size(); }
  cuda::LocalRanks ranks() const override {
    cuda::LocalRanks own{};
    own.table = arenas_->group.peers(rank_);
    own.count = 1, own.rank[0] = static_cast<std::int16_t>(rank_);
    return own;
  }
  std::uint64_t window(const std::string& name, std::size_t bytes) override {
    std::vector<LocalArenas::Window>& booked = arenas_->windows;
    if (next_ == booked.size()) booked.push_back({name, bytes, arenas_->group.window(name, bytes)});
    const LocalArenas::Window& own = booked[next_++];
    WB_CHECK(own.name == name && own.bytes == bytes, "rank {} books window {} of {} bytes where another rank booked {} of {}", rank_, name, bytes, own.name,
             own.bytes);
    return own.offset;
  }
  void everybody_is_ready() override {}  // a group is given out when all of its ranks are made
  std::string first_error() const override { return arenas_->group.first_error(); }
  void meet(cudaStream_t stream) override { arenas_->meeting.come(rank_, stream); }
  bool is_local_group() const override { return true; }
  int ranks_on_device() const override {
    return static_cast<int>(std::count(arenas_->devices.begin(), arenas_->devices.end(), arenas_->devices[static_cast<std::size_t>(rank_)]));
  }

 private:
  std::shared_ptr<LocalArenas> arenas_;
  int rank_;
  std::size_t next_ = 0;  // of the windows
};

}  // namespace

std::chrono::milliseconds& local_timeout() {
  static std::chrono::milliseconds timeout{60000};
  return timeout;
}

std::vector<std::unique_ptr<ProcessMemory>> make_local_memory(std::span<const std::int32_t> devices, std::size_t arena_bytes) {
  WB_CHECK(!devices.empty(), "a group within one process has 1 rank at least, got {}", devices.size());
  for (const std::int32_t device : devices) (void)checked_group(nullptr, device);
  const auto arenas = std::make_shared<LocalArenas>(devices, arena_bytes);
  std::vector<std::unique_ptr<ProcessMemory>> memory;
  for (int rank = 0; rank < arenas->group.size(); ++rank) memory.push_back(std::make_unique<LocalMemory>(arenas, rank));
  return memory;
}

cuda::ExchangeTuning tuning_beside(int ranks) {
  cuda::ExchangeTuning tuning;
  if (ranks == 1) return tuning;
  const int ctas = std::max(1, 32 / ranks);
  tuning.dispatch_ctas = tuning.chunk_ctas = tuning.combine_ctas = tuning.value_ctas = tuning.arriving_ctas = ctas;
  tuning.fused_plan = tuning.fused_layout = false, tuning.local_ctas = ctas;
  tuning.fused_combine_ctas = -1;
  tuning.overlap_launches = false;  // kernels that start early and wait for the one before would fill the GPU
  return tuning;
}

wb_process_group checked_group(const wb_process_group* group, std::int32_t device) {
  (void)to_device(WB_CUDA_DEVICE, device, "device", Memory::kAny);
  wb_process_group ranks{};
  ranks.size = 1;
  if (group == nullptr) {
    check_gpu(device);
    return ranks;
  }
  ranks = read_struct(group, "group");
  WB_CHECK(ranks.size >= 1 && ranks.rank >= 0 && ranks.rank < ranks.size, "group: rank {} of {} is none", ranks.rank, ranks.size);
  WB_CHECK(ranks.device == device, "group.device is {}, device {}", ranks.device, device);
  (void)required(ranks.address, "group.address");
  check_gpu(device);
  return ranks;
}

std::unique_ptr<ProcessMemory> make_process_memory(int device, const wb_process_group* group, std::size_t arena_bytes, bool may_have_nodes) {
  if (group != nullptr) return make_nccl_memory(*group, arena_bytes, may_have_nodes);
  return std::make_unique<OwnMemory>(device, arena_bytes);
}

}  // namespace waybill::capi
