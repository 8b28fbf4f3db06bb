// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_world.h"

#include <vector>

#include "core/cuda/cuda_error.h"
#include "fabric/nccl/nccl_pointers.h"
#include "fabric/nccl/nccl_transport.h"

namespace waybill::cuda {
namespace {

constexpr std::size_t kPage = std::size_t{2} << 20;  // of cuMem allocations
constexpr std::size_t kAlignment = 256;
std::size_t rounded(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

int choose_device(const ProcessRank& self) {
  int count = 0;
  WB_TRY_CUDA(cudaGetDeviceCount(&count));
  WB_CHECK(self.local_rank >= 0 && self.local_rank < count, "rank {} is number {} of its host, which shows {} GPUs; the nccl engine takes one a process",
           self.rank, self.local_rank, count);
  WB_TRY_CUDA(cudaSetDevice(self.local_rank));
  return self.local_rank;
}

}  // namespace

NcclWorld::NcclWorld(const NcclOptions& options, const ProcessRank& self)
    : self_(self),
      device_(choose_device(self)),
      arena_bytes_(rounded(rounded(sizeof(DeviceControl), kAlignment) + options.arena_bytes, kPage)),
      used_(rounded(sizeof(DeviceControl), kAlignment)),
      timeout_ns_(static_cast<std::uint64_t>(options.timeout.count()) * 1000000u) {
  WB_CHECK(self.size <= kMaxDevicePeers, "a group has 1 to {} ranks, got P = {}", kMaxDevicePeers, self.size);
  WB_CHECK(options.timeout.count() > 0, "the timeout must be positive, got {} ms", options.timeout.count());
  const NcclLibrary& nccl = nccl_library();
  ncclUniqueId id{};
  if (self.rank == 0) WB_TRY_NCCL(nccl.get_unique_id(&id));
  hand_out(self, &id, sizeof(id), options.timeout);
  WB_TRY_NCCL(nccl.comm_init_rank(&comm_, self.size, id, self.rank));
  fabric_ = make_caller_fabric(std::make_unique<NcclTransport>(comm_, self.rank, self.size, options.timeout), self.size, self.rank,
                               FabricOptions{.timeout = options.timeout});
  std::int64_t sizes[2] = {static_cast<std::int64_t>(arena_bytes_), -static_cast<std::int64_t>(arena_bytes_)};
  fabric_->all_reduce(std::span<std::int64_t>(sizes), ReduceOp::kMax, "nccl arena");
  WB_CHECK(sizes[0] == -sizes[1], "the arenas of all ranks must have one size, got {} to {} bytes", -sizes[1], sizes[0]);
  WB_TRY_NCCL(nccl.mem_alloc(&arena_, arena_bytes_));
  WB_TRY_CUDA(cudaMemset(arena_, 0, arena_bytes_));
  WB_TRY_CUDA(cudaDeviceSynchronize());
  WB_TRY_NCCL(nccl.window_register(comm_, arena_, arena_bytes_, &window_, NCCL_WIN_DEFAULT));
  const int reached = nccl.team_lsa(comm_).num_ranks;
  std::int64_t fewest[1] = {reached};
  fabric_->all_reduce(std::span<std::int64_t>(fewest), ReduceOp::kMin, "nccl domain");
  WB_CHECK(fewest[0] == self.size, "rank {} reaches the memory of {} of {} ranks, some rank of {}: the nccl engine needs all of them in one NVLink domain",
           self.rank, reached, self.size, fewest[0]);
  const DeviceBuffer table(sizeof(peers_.base), device_);
  launch_window_pointers(window_, self.size, table.as<void*>(), nullptr);
  check_launch("nccl_window_pointers");
  table.download(peers_.base, sizeof(void*) * static_cast<std::size_t>(self.size));
  WB_TRY_CUDA(cudaDeviceSynchronize());
  peers_.rank = self.rank, peers_.size = self.size, peers_.timeout_ns = timeout_ns_;
  fabric_->barrier("nccl arena is there");
}

NcclWorld::~NcclWorld() {
  if (comm_ == nullptr) return;
  const NcclLibrary& nccl = nccl_library();
  (void)cudaDeviceSynchronize();
  if (window_ != nullptr) (void)nccl.window_deregister(comm_, window_);
  fabric_.reset();
  if (arena_ != nullptr) (void)nccl.mem_free(arena_);
  (void)nccl.comm_destroy(comm_);
}

void NcclWorld::abandon() noexcept {
  if (comm_ == nullptr) return;
  fabric_.reset();
  (void)nccl_library().comm_abort(comm_);
  comm_ = nullptr;  // the arena stays mapped until the process ends
}

std::uint64_t NcclWorld::window(const std::string& name, std::size_t bytes) {
  std::int64_t sizes[2] = {static_cast<std::int64_t>(bytes), -static_cast<std::int64_t>(bytes)};
  fabric_->all_reduce(std::span<std::int64_t>(sizes), ReduceOp::kMax, "window " + name);
  WB_CHECK(sizes[0] == -sizes[1], "window {} must have one size on all ranks, got {} to {} bytes", name, -sizes[1], sizes[0]);
  if (bytes > arena_bytes_ || used_ + rounded(bytes, kAlignment) > arena_bytes_) {
    WB_FAIL(ErrorCode::kOutOfMemory, "window {} of {} bytes does not fit: {} of {} bytes of the arena are taken", name, bytes, used_, arena_bytes_);
  }
  const std::size_t offset = used_;
  used_ += rounded(bytes, kAlignment);
  return offset;
}

LocalRanks NcclWorld::local_ranks() const {
  LocalRanks ranks{};
  ranks.table = peers_, ranks.count = 1, ranks.rank[0] = static_cast<std::int16_t>(self_.rank);
  return ranks;
}

std::string NcclWorld::first_error() const {
  DeviceWaitError e{};
  WB_TRY_CUDA(cudaDeviceSynchronize());
  WB_TRY_CUDA(cudaMemcpy(&e, &at<DeviceControl>(0)->error, sizeof(e), cudaMemcpyDeviceToHost));
  return e.state == 0 ? std::string() : fmt::format("phase {}: rank {} waited for rank {}, expected {}, saw {}", e.phase, e.rank, e.peer, e.expected, e.seen);
}

void NcclWorld::clear_errors() {
  WB_TRY_CUDA(cudaDeviceSynchronize());
  fabric_->barrier("nccl errors: no kernel runs");
  WB_TRY_CUDA(cudaMemset(arena_, 0, sizeof(DeviceControl)));
  WB_TRY_CUDA(cudaDeviceSynchronize());
  fabric_->barrier("nccl errors: cleared");
}

}  // namespace waybill::cuda
