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
#include "fabric/nccl/nccl_progress.h"
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
      side_(device_),
      progress_(sizeof(RailProgress)) {
  WB_CHECK(options.ranks_per_node != kOneNode || self.size <= kMaxDevicePeers, "a node has 1 to {} ranks, got P = {}", kMaxDevicePeers, self.size);
  WB_CHECK(options.timeout.count() > 0, "the timeout must be positive, got {} ms", options.timeout.count());
  const NcclLibrary& nccl = nccl_library();
  const auto start_ms = std::chrono::duration_cast<std::chrono::milliseconds>(start_timeout_);
  ncclUniqueId id{};
  if (self.rank == 0) WB_TRY_NCCL(nccl.get_unique_id(&id));
  hand_out(self, &id, sizeof(id), start_ms);
  start_nccl(id);
  const auto enter_thread = [device = device_] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaSetDevice(device), (void)cudaThreadExchangeStreamCaptureMode(&mode);
  };
  watch_ = std::make_unique<NcclWatch>(nccl, comm_, self.rank, self.size, NcclWatch::Hooks{enter_thread, [this] { poison(); }});
  const auto collective = [this](cudaStream_t stream, ncclResult_t error) {
    watch_->count_collective();
    if (error != ncclSuccess) refuse(stream, "a host collective", error);
    await(stream, "a host collective", rail_ == nullptr ? start_timeout_ : timeout_, /*has_results=*/true);
  };
  fabric_ =
      make_caller_fabric(std::make_unique<NcclTransport>(nccl, comm_, self.size, collective), self.size, self.rank, FabricOptions{.timeout = options.timeout});
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
  auto* const progress = progress_.at<RailProgress>(0);
  if (num_nodes() > 1) {
    lifeline_ = std::make_unique<Lifeline>(*fabric_, self, peers_.size, start_ms);
    for (std::uint32_t* count : {&progress->begun, &progress->ended}) launch_nccl_progress(count, side_);  // a kernel's first launch loads it
    check_launch("nccl_progress");
    side_.synchronize();
    WB_CHECK(progress->begun == 1 && progress->ended == 1, "rank {} of {}: kernels do not reach host memory", self.rank, self.size);
  }
  fabric_->barrier("nccl arena is there");
  rail_ = make_nccl_rail(nccl, comm_, self.rank, peers_.size, self.size, num_nodes() > 1 ? progress : nullptr, &at<DeviceControl>(0)->poison,
                         [this](cudaStream_t stream, ncclResult_t error) { refuse(stream, "messages between nodes", error); });
  if (num_nodes() > 1) watch_->start(*lifeline_, peers_.size, *progress, timeout_);
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
  comm_.set(*comm);
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
  window_ = register_arena(comm_.use().get());
  const int reached = nccl.team_lsa(comm_.use().get()).num_ranks;
  std::int64_t ends[2] = {reached, -reached};
  fabric_->all_reduce(std::span<std::int64_t>(ends), ReduceOp::kMax, "nccl domain");
  const std::int64_t most = ends[0], fewest = -ends[1];
  if (fewest == self_.size) return self_.size;
  WB_CHECK(wanted == kNodesByTopology,
           "rank {} reaches the memory of {} of {} ranks, some rank of {}: ranks that are not in one NVLink domain need NcclOptions::ranks_per_node",
           self_.rank, reached, self_.size, fewest);
  WB_CHECK(most == fewest && self_.size % fewest == 0, "{} ranks in NVLink domains of {} to {}: nodes must have equally many", self_.size, fewest, most);
  WB_TRY_NCCL(nccl.window_deregister(comm_.use().get(), window_));
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
    start("NCCL's start of a node", [&nccl, comm, all = comm_.use().get(), node = self_.rank / ranks_per_node, rank = self_.rank] {
      return nccl.comm_split(all, node, rank, comm.get(), nullptr);
    });
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
  const auto idle = [device = device_] { (void)cudaSetDevice(device), (void)cudaDeviceSynchronize(); };
  // NCCL's kernels wait without a timeout for a rank of another node that is lost, or has left in the middle of a step. The connections of a process that
  // has ended may last until its GPU memory is gone.
  if (watch_->is_lost() || (num_nodes() > 1 && !ends_within(timeout_, idle, [this] { return watch_->is_lost(); }))) {
    abandon();
    return;
  }
  const NcclLibrary& nccl = nccl_library();
  (void)cudaDeviceSynchronize();
  watch_->stop();
  const ncclComm_t comm = comm_.take(timeout_);
  if (comm == nullptr) {  // given up at the last moment
    leave();
    return;
  }
  if (window_ != nullptr) (void)nccl.window_deregister(node_comm_ != nullptr ? node_comm_ : comm, window_);
  fabric_.reset();
  if (arena_ != nullptr) (void)nccl.mem_free(arena_);
  if (node_comm_ != nullptr) (void)nccl.comm_destroy(node_comm_);
  (void)nccl.comm_destroy(comm);
}

// Kernels that wait inside the node leave. On a thread of its own, which may have to wait until an abort has emptied the device's queue, and in a mode that
// disturbs no capture.
void NcclWorld::poison() noexcept {
  if (arena_ == nullptr) return;
  const auto set = [device = device_, word = &at<DeviceControl>(0)->poison, stream = side_.get()] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaSetDevice(device), (void)cudaThreadExchangeStreamCaptureMode(&mode);
    (void)cudaMemsetAsync(word, 1, sizeof(std::uint32_t), stream), (void)cudaStreamSynchronize(stream);
  };
  (void)ends_within(std::chrono::milliseconds(500), set);
}

// The arena stays mapped until the process ends.
void NcclWorld::leave() noexcept {
  if (std::exchange(has_left_, true)) return;
  watch_->stop();
  const bool is_idle = ends_within(std::chrono::seconds(10), [device = device_] { (void)cudaSetDevice(device), (void)cudaDeviceSynchronize(); });
  if (is_idle) return;
  (void)fabric_.release();  // their memory would be freed behind kernels that do not end
  (void)new PinnedBuffer(std::move(progress_));
}

void NcclWorld::abandon() noexcept {
  const bool is_first = !comm_.is_taken();
  watch_->give_up(ErrorCode::kPeerFailed, "the group has been abandoned");
  if (is_first) (void)watch_->has_aborted_within(std::chrono::seconds(10));
  leave();
}

void NcclWorld::synchronize(cudaStream_t stream, const char* what) {
  if (lifeline_ != nullptr) return await(stream, what, timeout_, /*has_results=*/false);
  WB_TRY_CUDA(cudaStreamSynchronize(stream));
}

// has_results: the stream ends only with what it waited for, so that a rank lost since does not matter. A step's kernels also end by poison.
void NcclWorld::await(cudaStream_t stream, const char* what, std::chrono::nanoseconds timeout, bool has_results) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state != cudaErrorNotReady) WB_TRY_CUDA(state);
    if (state == cudaSuccess && has_results) return;
    // Read behind the stream's state: a neighbour that gave up has said so before it let its kernels go on.
    if (watch_->is_lost()) end_of(stream, what);
    if (state == cudaSuccess) return;
    if (std::chrono::steady_clock::now() >= end) watch_->time_out(timeout), end_of(stream, what);
    std::this_thread::yield();
  }
}

// NCCL may know of a lost rank before anybody looks: it then takes no more messages, while those it took before wait. They are released, and the rank is
// named, as there. Nothing runs of a stream that is being captured.
void NcclWorld::refuse(cudaStream_t stream, const char* what, ncclResult_t error) {
  watch_->refuse(error);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (stream != nullptr) WB_TRY_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) watch_->throw_lost(what);
  end_of(stream, what);
}

// The group is given up: the stream's kernels leave.
void NcclWorld::end_of(cudaStream_t stream, const char* what) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  cudaError_t state = cudaStreamQuery(stream);
  for (; state == cudaErrorNotReady && std::chrono::steady_clock::now() < end; state = cudaStreamQuery(stream)) std::this_thread::yield();
  watch_->throw_lost(state == cudaErrorNotReady ? fmt::format("{} (kernels on the stream still wait)", what).c_str() : what);
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
