// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_world.h"

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "fabric/nccl/nccl_pointers.h"
#include "fabric/nccl/nccl_rail.h"
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
      timeout_ns_(static_cast<std::uint64_t>(options.timeout.count()) * 1000000u),
      side_(device_) {
  WB_CHECK(options.ranks_per_node != kOneNode || self.size <= kMaxDevicePeers, "a node has 1 to {} ranks, got P = {}", kMaxDevicePeers, self.size);
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
  map_arena(choose_nodes(options.ranks_per_node));
  rail_ = make_nccl_rail(nccl, comm_, self.rank, peers_.size, self.size, [this](cudaStream_t stream, ncclResult_t error) { refuse(stream, error); });
  if (num_nodes() > 1) lifeline_ = std::make_unique<Lifeline>(*fabric_, self, peers_.size, options.timeout);
  fabric_->barrier("nccl arena is there");
}

// Ranks of a node. Ends with a window only where that is all of them.
int NcclWorld::choose_nodes(int wanted) {
  const NcclLibrary& nccl = nccl_library();
  WB_CHECK(wanted >= kNodesByTopology && (wanted <= 0 || self_.size % wanted == 0), "{} ranks cannot make nodes of {}", self_.size, wanted);
  if (wanted > 0 && wanted < self_.size) return wanted;
  WB_TRY_NCCL(nccl.window_register(comm_, arena_, arena_bytes_, &window_, NCCL_WIN_DEFAULT));
  const int reached = nccl.team_lsa(comm_).num_ranks;
  std::int64_t ends[2] = {reached, -reached};
  fabric_->all_reduce(std::span<std::int64_t>(ends), ReduceOp::kMax, "nccl domain");
  const std::int64_t most = ends[0], fewest = -ends[1];
  if (fewest == self_.size) return self_.size;
  WB_CHECK(wanted == kNodesByTopology,
           "rank {} reaches the memory of {} of {} ranks, some rank of {}: ranks that are not in one NVLink domain need NcclOptions::ranks_per_node",
           self_.rank, reached, self_.size, fewest);
  WB_CHECK(most == fewest && self_.size % fewest == 0, "{} ranks in NVLink domains of {} to {}: nodes must have equally many", self_.size, fewest, most);
  WB_TRY_NCCL(nccl.window_deregister(comm_, window_));
  window_ = nullptr;
  return reached;
}

// The table of a node's arenas.
void NcclWorld::map_arena(int ranks_per_node) {
  const NcclLibrary& nccl = nccl_library();
  peers_.rank = self_.rank % ranks_per_node, peers_.size = ranks_per_node, peers_.timeout_ns = timeout_ns_;
  if (ranks_per_node == 1) {
    peers_.base[0] = static_cast<unsigned char*>(arena_);
    return;
  }
  if (ranks_per_node < self_.size) {
    WB_TRY_NCCL(nccl.comm_split(comm_, self_.rank / ranks_per_node, self_.rank, &node_comm_, nullptr));
    WB_TRY_NCCL(nccl.window_register(node_comm_, arena_, arena_bytes_, &window_, NCCL_WIN_DEFAULT));
    const int reached = nccl.team_lsa(node_comm_).num_ranks;
    WB_CHECK(reached == ranks_per_node, "rank {} reaches the memory of {} of the {} ranks of its node", self_.rank, reached, ranks_per_node);
  }
  const DeviceBuffer table(sizeof(peers_.base), device_);
  launch_window_pointers(window_, ranks_per_node, table.as<void*>(), nullptr);
  check_launch("nccl_window_pointers");
  table.download(peers_.base, sizeof(void*) * static_cast<std::size_t>(ranks_per_node));
  WB_TRY_CUDA(cudaDeviceSynchronize());
}

NcclWorld::~NcclWorld() {
  if (comm_ == nullptr) return;
  const NcclLibrary& nccl = nccl_library();
  (void)cudaDeviceSynchronize();
  if (window_ != nullptr) (void)nccl.window_deregister(node_comm_ != nullptr ? node_comm_ : comm_, window_);
  fabric_.reset();
  if (arena_ != nullptr) (void)nccl.mem_free(arena_);
  if (node_comm_ != nullptr) (void)nccl.comm_destroy(node_comm_);
  (void)nccl.comm_destroy(comm_);
}

void NcclWorld::abandon() noexcept {
  fabric_.reset();
  if (comm_ != nullptr) (void)nccl_library().comm_abort(std::exchange(comm_, nullptr));  // the arena stays mapped until the process ends
}

void NcclWorld::synchronize(cudaStream_t stream, const char* what) {
  if (lifeline_ == nullptr) {
    WB_TRY_CUDA(cudaStreamSynchronize(stream));
    return;
  }
  const auto name = [&](int rank) { return fmt::format("rank {} of node {}", rank, rank / peers_.size); };
  const std::chrono::nanoseconds timeout(timeout_ns_);
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) WB_TRY_CUDA(state);
    // Read behind the stream's state: a neighbour that gave up has said so before it let its kernels go on.
    ncclResult_t error = comm_ == nullptr ? ncclRemoteError : ncclSuccess;
    if (comm_ != nullptr) WB_TRY_NCCL(nccl_library().comm_get_async_error(comm_, &error));
    int lost = lifeline_->lost();
    const bool has_failed = error != ncclSuccess && error != ncclInProgress;
    for (int i = 0; has_failed && lost < 0 && i < 100; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10)), lost = lifeline_->lost();
    if (lost >= 0) {
      lifeline_->tell(lost);
      give_up(stream, ErrorCode::kPeerFailed, fmt::format("rank {} of {}: {}: {} is lost, its process has ended", self_.rank, self_.size, what, name(lost)));
    }
    if (has_failed)
      give_up(stream, ErrorCode::kPeerFailed, fmt::format("rank {} of {}: {}: NCCL: {}", self_.rank, self_.size, what, nccl_library().error_string(error)));
    if (state == cudaSuccess) return;
    if (std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
      continue;
    }
    std::string late;
    const std::vector<int> silent = lifeline_->silent(std::chrono::milliseconds(500));
    for (const int rank : silent) late += (late.empty() ? "" : ", ") + name(rank);
    if (!silent.empty()) lifeline_->tell(silent.front());
    give_up(stream, ErrorCode::kTimeout,
            fmt::format("rank {} of {}: {} took longer than {} ms; {}", self_.rank, self_.size, what, timeout_ns_ / 1000000u,
                        late.empty() ? "all neighbours answer" : "no answer from " + late));
  }
}

// NCCL may know of a lost rank before synchronize() looks: it then takes no more messages, while those it took before wait. They are released, and the rank is
// named, as there. Nothing runs of a stream that is being captured.
void NcclWorld::refuse(cudaStream_t stream, ncclResult_t error) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (stream != nullptr) WB_TRY_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (lifeline_ != nullptr && capture == cudaStreamCaptureStatusNone) synchronize(stream, "messages between nodes");
  WB_FAIL(ErrorCode::kPeerFailed, "rank {} of {}: messages between nodes: NCCL: {}", self_.rank, self_.size, nccl_library().error_string(error));
}

// Makes every kernel on `stream` leave: waits inside the node by their poison, NCCL's by an abort, which itself waits for graphs to be destroyed.
void NcclWorld::give_up(cudaStream_t stream, ErrorCode code, const std::string& text) {
  (void)cudaMemsetAsync(&at<DeviceControl>(0)->poison, 1, sizeof(std::uint32_t), side_);
  if (comm_ != nullptr) std::thread([comm = std::exchange(comm_, nullptr)] { (void)nccl_library().comm_abort(comm); }).detach();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (cudaStreamQuery(stream) == cudaErrorNotReady && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  WB_FAIL(code, "{}", text);
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
  ranks.table = peers_, ranks.count = 1, ranks.rank[0] = static_cast<std::int16_t>(peers_.rank);
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
