// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_world.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "fabric/nccl/bounded_call.h"
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
      timeout_(options.timeout),
      start_timeout_(std::max(options.timeout, options.start_timeout)),
      side_(device_) {
  WB_CHECK(options.ranks_per_node != kOneNode || self.size <= kMaxDevicePeers, "a node has 1 to {} ranks, got P = {}", kMaxDevicePeers, self.size);
  WB_CHECK(options.timeout.count() > 0, "the timeout must be positive, got {} ms", options.timeout.count());
  const NcclLibrary& nccl = nccl_library();
  const auto start_ms = std::chrono::duration_cast<std::chrono::milliseconds>(start_timeout_);
  ncclUniqueId id{};
  if (self.rank == 0) WB_TRY_NCCL(nccl.get_unique_id(&id));
  hand_out(self, &id, sizeof(id), start_ms);
  start_nccl(id);
  const auto collective = [this](cudaStream_t stream, ncclResult_t error) {
    if (error != ncclSuccess) refuse(stream, "a host collective", error);
    await(stream, "a host collective", rail_ == nullptr ? start_timeout_ : timeout_, /*has_results=*/true);
  };
  fabric_ = make_caller_fabric(std::make_unique<NcclTransport>(nccl, comm_, self.rank, self.size, collective), self.size, self.rank,
                               FabricOptions{.timeout = options.timeout});
  std::int64_t sizes[2] = {static_cast<std::int64_t>(arena_bytes_), -static_cast<std::int64_t>(arena_bytes_)};
  fabric_->all_reduce(std::span<std::int64_t>(sizes), ReduceOp::kMax, "nccl arena");
  WB_CHECK(sizes[0] == -sizes[1], "the arenas of all ranks must have one size, got {} to {} bytes", -sizes[1], sizes[0]);
  // Told to all: the others would wait for the registration of an arena that is not there.
  std::int64_t without[] = {nccl.mem_alloc(&arena_, arena_bytes_) == ncclSuccess ? -1 : self.rank};
  fabric_->all_reduce(std::span<std::int64_t>(without), ReduceOp::kMax, "nccl arena is allocated");
  if (without[0] >= 0)
    WB_FAIL(ErrorCode::kOutOfMemory, "rank {} of {}: rank {} has no memory for an arena of {} bytes", self.rank, self.size, without[0], arena_bytes_);
  WB_TRY_CUDA(cudaMemset(arena_, 0, arena_bytes_));
  WB_TRY_CUDA(cudaDeviceSynchronize());
  map_arena(choose_nodes(options.ranks_per_node));
  if (num_nodes() > 1) lifeline_ = std::make_unique<Lifeline>(*fabric_, self, peers_.size, start_ms);
  fabric_->barrier("nccl arena is there");
  rail_ = make_nccl_rail(nccl, comm_, self.rank, peers_.size, self.size,
                         [this](cudaStream_t stream, ncclResult_t error) { refuse(stream, "messages between nodes", error); });
}

// NCCL's own collective calls, which wait for other processes without a timeout. `call` owns what it touches: a thread of its own runs it, and goes on where
// that takes too long.
template <class Call>
void NcclWorld::start(const char* what, Call call) {
  const auto error = std::make_shared<ncclResult_t>(ncclInProgress);
  const bool has_ended = ends_within(start_timeout_, [error, device = device_, call] {
    WB_TRY_CUDA(cudaSetDevice(device));
    *error = call();
  });
  if (!has_ended)
    WB_FAIL(ErrorCode::kTimeout, "rank {} of {}: {} took longer than {} ms: a rank has ended on the way, or does not reach the others", self_.rank, self_.size,
            what, std::chrono::duration_cast<std::chrono::milliseconds>(start_timeout_).count());
  if (*error != ncclSuccess) throw_nccl_error(*error, what);
}

// The communicator, connected to every rank: a message between two ranks that never met waits without a timeout for their connection.
void NcclWorld::start_nccl(const ncclUniqueId& id) {
  const NcclLibrary& nccl = nccl_library();
  const auto comm = std::make_shared<ncclComm_t>(nullptr);
  start("NCCL's start", [&nccl, comm, id, rank = self_.rank, size = self_.size, device = device_] {
    const ncclResult_t error = nccl.comm_init_rank(comm.get(), size, id, rank);
    if (error != ncclSuccess) return error;
    const DeviceBuffer bytes(2 * static_cast<std::size_t>(size), device);
    const CudaStream stream(device);
    const ncclResult_t connected = in_one_group(nccl, [&] {
      for (int p = 0; p < size; ++p) {
        if (p == rank) continue;
        ncclResult_t queued = nccl.send(bytes.as<char>() + p, 1, ncclInt8, p, *comm, stream);
        if (queued == ncclSuccess) queued = nccl.receive(bytes.as<char>() + size + p, 1, ncclInt8, p, *comm, stream);
        if (queued != ncclSuccess) return queued;
      }
      return ncclSuccess;
    });
    if (connected == ncclSuccess) stream.synchronize();
    return connected;
  });
  comm_ = *comm;
}

ncclWindow_t NcclWorld::register_arena(ncclComm_t comm) {
  const NcclLibrary& nccl = nccl_library();
  const auto window = std::make_shared<ncclWindow_t>(nullptr);
  start("NCCL's registration of the arena",
        [&nccl, comm, window, arena = arena_, bytes = arena_bytes_] { return nccl.window_register(comm, arena, bytes, window.get(), NCCL_WIN_DEFAULT); });
  return *window;
}

// Ranks of a node. Ends with a window only where that is all of them.
int NcclWorld::choose_nodes(int wanted) {
  const NcclLibrary& nccl = nccl_library();
  WB_CHECK(wanted >= kNodesByTopology && (wanted <= 0 || self_.size % wanted == 0), "{} ranks cannot make nodes of {}", self_.size, wanted);
  if (wanted > 0 && wanted < self_.size) return wanted;
  window_ = register_arena(comm_);
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
  peers_.rank = self_.rank % ranks_per_node, peers_.size = ranks_per_node;
  // Several nodes: behind synchronize(), which knows whether a rank of another node is what a neighbour waits for.
  const auto timeout = ranks_per_node < self_.size ? timeout_ + std::chrono::seconds(3) : timeout_;
  peers_.timeout_ns = static_cast<std::uint64_t>(timeout.count());
  if (ranks_per_node == 1) {
    peers_.base[0] = static_cast<unsigned char*>(arena_);
    return;
  }
  if (ranks_per_node < self_.size) {
    const auto comm = std::make_shared<ncclComm_t>(nullptr);
    start("NCCL's start of a node",
          [&nccl, comm, all = comm_, node = self_.rank / ranks_per_node, rank = self_.rank] { return nccl.comm_split(all, node, rank, comm.get(), nullptr); });
    node_comm_ = *comm;
    window_ = register_arena(node_comm_);
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
  const auto idle = [device = device_] { (void)cudaSetDevice(device), (void)cudaDeviceSynchronize(); };
  // NCCL's kernels wait without a timeout for a rank of another node that is lost, or has left in the middle of a step. The connections of a process that
  // has ended may last until its GPU memory is gone.
  if (has_lost_a_rank() || (num_nodes() > 1 && !ends_within(timeout_, idle, [this] { return has_lost_a_rank(); }))) {
    abandon();
    return;
  }
  const NcclLibrary& nccl = nccl_library();
  (void)cudaDeviceSynchronize();
  if (window_ != nullptr) (void)nccl.window_deregister(node_comm_ != nullptr ? node_comm_ : comm_, window_);
  fabric_.reset();
  if (arena_ != nullptr) (void)nccl.mem_free(arena_);
  if (node_comm_ != nullptr) (void)nccl.comm_destroy(node_comm_);
  (void)nccl.comm_destroy(comm_);
}

bool NcclWorld::has_lost_a_rank() noexcept {
  ncclResult_t error = ncclSuccess;
  if (comm_ != nullptr) (void)nccl_library().comm_get_async_error(comm_, &error);
  return (error != ncclSuccess && error != ncclInProgress) || (lifeline_ != nullptr && lifeline_->lost() >= 0);
}

// Kernels that wait inside the node leave.
void NcclWorld::poison() noexcept {
  if (arena_ != nullptr) (void)cudaMemsetAsync(&at<DeviceControl>(0)->poison, 1, sizeof(std::uint32_t), side_);
}

// The arena stays mapped until the process ends.
void NcclWorld::abandon() noexcept {
  constexpr std::chrono::seconds kPatience(10);
  poison();
  if (comm_ != nullptr) (void)ends_within(kPatience, [comm = std::exchange(comm_, nullptr)] { (void)nccl_library().comm_abort(comm); });
  const bool is_idle = ends_within(kPatience, [device = device_] { (void)cudaSetDevice(device), (void)cudaDeviceSynchronize(); });
  if (!is_idle) (void)fabric_.release();  // its memory would be freed behind kernels that do not end
}

void NcclWorld::synchronize(cudaStream_t stream, const char* what) {
  if (lifeline_ != nullptr) return await(stream, what, timeout_, /*has_results=*/false);
  WB_TRY_CUDA(cudaStreamSynchronize(stream));
}

std::string NcclWorld::name(int rank) const { return fmt::format("rank {} of node {}", rank, rank / peers_.size); }

// NCCL may know that a connection has ended before the lifeline does: a second for its word.
std::string NcclWorld::loss(const char* what, ncclResult_t error) {
  int lost = lifeline_ != nullptr ? lifeline_->lost() : -1;
  for (int i = 0; lifeline_ != nullptr && lost < 0 && i < 100; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10)), lost = lifeline_->lost();
  if (lost < 0) return fmt::format("rank {} of {}: {}: NCCL: {}", self_.rank, self_.size, what, nccl_library().error_string(error));
  lifeline_->tell(lost, lifeline_->has_ended());
  if (lost == self_.rank) return fmt::format("rank {} of {}: {}: the others gave this rank up, it did not answer in time", self_.rank, self_.size, what);
  return fmt::format("rank {} of {}: {}: {} is lost, {}", self_.rank, self_.size, what, name(lost),
                     lifeline_->has_ended() ? "its process has ended" : "it did not answer its neighbours");
}

// has_results: the stream ends only with what it waited for, so that a rank lost since does not matter. A step's kernels also end by poison.
void NcclWorld::await(cudaStream_t stream, const char* what, std::chrono::nanoseconds timeout, bool has_results) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) WB_TRY_CUDA(state);
    if (state == cudaSuccess && has_results) return;
    // Read behind the stream's state: a neighbour that gave up has said so before it let its kernels go on.
    ncclResult_t error = comm_ == nullptr ? ncclRemoteError : ncclSuccess;
    if (comm_ != nullptr) WB_TRY_NCCL(nccl_library().comm_get_async_error(comm_, &error));
    const bool has_failed = error != ncclSuccess && error != ncclInProgress;
    if (has_failed || (lifeline_ != nullptr && lifeline_->lost() >= 0)) give_up(stream, ErrorCode::kPeerFailed, loss(what, error));
    if (state == cudaSuccess) return;
    if (std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
      continue;
    }
    std::string late;
    if (lifeline_ != nullptr) {
      const std::vector<int> silent = lifeline_->silent(std::chrono::milliseconds(500));
      if (lifeline_->lost() >= 0) give_up(stream, ErrorCode::kPeerFailed, loss(what, error));
      for (const int rank : silent) late += (late.empty() ? "; no answer from " : ", ") + name(rank);
      if (!silent.empty()) lifeline_->tell(silent.front(), false);
      if (silent.empty()) late = "; all neighbours answer";
    }
    give_up(stream, ErrorCode::kTimeout,
            fmt::format("rank {} of {}: {} took longer than {} ms{}", self_.rank, self_.size, what,
                        std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count(), late));
  }
}

// NCCL may know of a lost rank before await() looks: it then takes no more messages, while those it took before wait. They are released, and the rank is
// named, as there. Nothing runs of a stream that is being captured: what other streams hold is synchronize()'s.
void NcclWorld::refuse(cudaStream_t stream, const char* what, ncclResult_t error) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (stream != nullptr) WB_TRY_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) WB_FAIL(ErrorCode::kPeerFailed, "{}", loss(what, error));
  give_up(stream, ErrorCode::kPeerFailed, loss(what, error));
}

// NCCL's kernels leave by an abort, which itself waits for graphs to be destroyed.
void NcclWorld::give_up(cudaStream_t stream, ErrorCode code, const std::string& text) {
  poison();
  if (comm_ != nullptr) std::thread([comm = std::exchange(comm_, nullptr)] { (void)nccl_library().comm_abort(comm); }).detach();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  cudaError_t state = cudaStreamQuery(stream);
  for (; state == cudaErrorNotReady && std::chrono::steady_clock::now() < end; state = cudaStreamQuery(stream)) std::this_thread::yield();
  WB_FAIL(code, "{}{}", text, state == cudaErrorNotReady ? "; kernels on the stream still wait" : "");
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
