// SPDX-License-Identifier: Apache-2.0
#include "fabric/mpi/transport.h"

#include <algorithm>
#include <csignal>
#include <cstring>

namespace waybill::mpi {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int kControlTag = 1;
constexpr auto kPatience = 5s;                            // for the lock: far longer than MPI needs to move one step
constexpr auto kFarewell = 10s;                           // how long the end of a process waits for the others' end
constexpr auto kShortestNap = 10us, kLongestNap = 500us;  // the progress thread's sleep while peers have nothing for us

// MPI's TCP transport writes to the socket of a rank that was killed: with the default action SIGPIPE would end this process before
// anybody could say which rank is gone. A program's own choice stays.
void survive_broken_pipes() {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL && (action.sa_flags & SA_SIGINFO) == 0) {
    action.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &action, nullptr);
  }
}

std::string list(const std::vector<int>& ranks) { return fmt::format("{}", fmt::join(ranks, ", ")); }

}  // namespace

std::shared_ptr<Transport> Transport::get() {
  // A stuck transport is left alone at exit: its thread is inside MPI and still uses it.
  static std::shared_ptr<Transport> transport(new Transport(), [](Transport* ended) {
    if (ended->stop()) delete ended;
  });
  return transport;
}

Transport::Transport() {
  survive_broken_pipes();
  int initialised = 0, level = 0;
  MPI_Initialized(&initialised);
  if (initialised == 0) {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level), "MPI_Init_thread", "start");
    owns_mpi_ = true;
  } else {
    MPI_Query_thread(&level);
  }
  if (level < MPI_THREAD_SERIALIZED)
    WB_FAIL(ErrorCode::kUnsupported, "the MPI library offers thread level {}, MPI_THREAD_SERIALIZED ({}) is needed", level, MPI_THREAD_SERIALIZED);
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &data_), "MPI_Comm_dup", "start");
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &control_), "MPI_Comm_dup", "start");
  MPI_Comm_set_errhandler(data_, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(control_, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_rank(data_, &world_rank_);
  MPI_Comm_size(data_, &world_size_);
  thread_ = std::thread([this] { run(); });
}

Transport::Lock Transport::take_lock() {
  Lock lock(mutex_, std::defer_lock);
  if (!stuck_ && lock.try_lock_for(kPatience)) return lock;
  stuck_ = true;
  throw_error(ErrorCode::kPeerFailed, fmt::format("rank {} of the world: the MPI library does not return from a call", world_rank_));
}

void Transport::throw_stuck(const Operation& operation, std::chrono::milliseconds timeout) {
  stuck_ = true;
  const Group& group = operation.group();
  const std::vector<int> silent = operation.peers_not_heard();
  WB_FAIL(ErrorCode::kTimeout, "rank {} waited {} ms for {} in {}, and the MPI library does not return from a call (a peer may be dead)", group.rank,
          timeout.count(), silent.empty() ? std::string("the payload of its peers") : "rank " + list(silent), operation.describe());
}

void Transport::tell_waiters() {
  { const std::lock_guard lock(news_mutex_); }  // a waiter is either before its test or asleep
  changed_.notify_all();
}

bool Transport::stop() noexcept {
  try {
    {
      const Lock lock = take_lock();
      stopping_ = true;
    }
    wake_.notify_all();
    const auto deadline = Clock::now() + kPatience;
    while (!stopped_ && Clock::now() < deadline) std::this_thread::sleep_for(kLongestNap);
  } catch (...) {  // stuck
  }
  return stopped_;
}

Transport::~Transport() {
  thread_.join();
  if (owns_mpi_ && everybody_is_here()) MPI_Finalize();
}

// A barrier with a deadline: MPI_Finalize would wait for a dead rank for ever.
bool Transport::everybody_is_here() {
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(control_, &request) != MPI_SUCCESS) return false;
  const auto deadline = Clock::now() + kFarewell;
  for (int flag = 0; Clock::now() < deadline; std::this_thread::sleep_for(kLongestNap)) {
    if (MPI_Test(&request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (flag != 0) return true;
  }
  return false;
}

// Not one blocking call: the thread must be able to move what peers still wait for.
int Transport::agree_on_group_id() {
  int id = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const Lock lock = take_lock();
    id = next_group_id_;
    check_mpi(MPI_Iallreduce(MPI_IN_PLACE, &id, 1, MPI_INT, MPI_MAX, data_, &request), "MPI_Iallreduce", "start");
  }
  for (int flag = 0;;) {
    {
      const Lock lock = take_lock();
      check_mpi(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), "MPI_Test", "start");
    }
    if (flag != 0) return id;
    std::this_thread::sleep_for(kShortestNap);
  }
}

void Transport::run() {
  auto nap = std::chrono::microseconds(kShortestNap);
  Lock lock(mutex_);
  while (!stopping_) {
    if (pending_.empty()) {
      send_outgoing();
      wake_.wait(lock, [&] { return stopping_ || !pending_.empty() || num_unsent_ > 0; });
      nap = kShortestNap;
      continue;
    }
    if (progress_once()) {
      tell_waiters();
      nap = kShortestNap;
    } else {
      nap = std::min<std::chrono::microseconds>(nap * 2, kLongestNap);
    }
    lock.unlock();
    std::this_thread::sleep_for(nap);
    lock.lock();
  }
  send_outgoing();
  stopped_ = true;
}

// Moves every pending operation a step; true when one of them ended or failed.
bool Transport::progress_once() {
  bool news = false;
  send_outgoing();
  read_control();
  for (auto it = pending_.begin(); it != pending_.end();) {
    Operation& operation = **it;
    bool remove = failure_of(operation.group()) != nullptr;
    if (!remove) {
      try {
        if (!operation.started()) operation.start(data_);
        remove = operation.progress(data_);
      } catch (const Error& error) {
        fail_locked(operation.group(), error.code(), error.what());
        remove = true;
      }
    }
    if (remove && !operation.done()) {
      operation.abandon();
      abandoned_.push_back(*it);
    }
    news = news || remove;
    it = remove ? pending_.erase(it) : std::next(it);
  }
  return news;
}

void Transport::read_control() {
  for (;;) {
    int flag = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, kControlTag, control_, &flag, &status) != MPI_SUCCESS || flag == 0) return;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    std::vector<char> message(static_cast<std::size_t>(bytes));
    MPI_Recv(message.data(), bytes, MPI_BYTE, status.MPI_SOURCE, kControlTag, control_, MPI_STATUS_IGNORE);
    std::int32_t fields[2];  // group, code
    if (message.size() < sizeof(fields)) continue;
    std::memcpy(fields, message.data(), sizeof(fields));
    failures_.try_emplace(fields[0], Failure{static_cast<ErrorCode>(fields[1]), std::string(message.begin() + sizeof(fields), message.end())});
    ++num_failures_;
  }
}

void Transport::send_control(const Group& group, ErrorCode code, const std::string& reason) {
  const std::int32_t fields[2] = {group.id, static_cast<std::int32_t>(code)};
  for (const int world_rank : group.world_ranks) {
    if (world_rank == world_rank_) continue;
    Outgoing& message = outgoing_.emplace_back();
    message.world_rank = world_rank;
    message.bytes.resize(sizeof(fields) + reason.size());
    std::memcpy(message.bytes.data(), fields, sizeof(fields));
    std::memcpy(message.bytes.data() + sizeof(fields), reason.data(), reason.size());
    ++num_unsent_;
  }
  wake_.notify_one();
}

void Transport::send_outgoing() {
  if (num_unsent_ == 0) return;
  for (Outgoing& message : outgoing_) {
    if (message.sent) continue;
    message.sent = true;
    MPI_Isend(message.bytes.data(), static_cast<int>(message.bytes.size()), MPI_BYTE, message.world_rank, kControlTag, control_, &message.request);
  }
  num_unsent_ = 0;
}

const Transport::Failure* Transport::failure_of(const Group& group) const {
  if (failures_.empty()) return nullptr;
  if (const auto found = failures_.find(group.id); found != failures_.end()) return &found->second;
  for (const int ancestor : group.ancestors) {
    if (const auto found = failures_.find(ancestor); found != failures_.end()) return &found->second;
  }
  return nullptr;
}

void Transport::fail_locked(const Group& group, ErrorCode code, const std::string& reason) {
  // Our own mistake stays an invalid argument for everybody; every other failure reaches the peers as "a peer failed".
  const ErrorCode for_peers = code == ErrorCode::kInvalidArgument ? code : ErrorCode::kPeerFailed;
  if (!failures_.try_emplace(group.id, Failure{code, reason}).second) return;
  ++num_failures_;
  send_control(group, for_peers, reason);
}

void Transport::fail(const Group& group, ErrorCode code, const std::string& reason) noexcept {
  try {
    const Lock lock = take_lock();
    fail_locked(group, code, reason);
  } catch (...) {  // stuck, or out of memory for the text: the peers time out instead
  }
  tell_waiters();
}

void Transport::leave(const Group& group) noexcept {
  try {
    if (stuck_) return;
    const Lock lock = take_lock();
    if (failure_of(group) != nullptr) return;
    for (const int world_rank : group.world_ranks) {
      if (world_rank == world_rank_) continue;
      Header header;
      header.kind = Collective::kLeave;
      auto& [request, message] = leaving_.emplace_back(MPI_REQUEST_NULL, sizeof(Header));
      std::memcpy(message.data(), &header, sizeof(Header));
      MPI_Isend(message.data(), sizeof(Header), MPI_BYTE, world_rank, Operation::header_tag_of(group), data_, &request);
    }
  } catch (...) {  // peers that still wait for this rank time out instead
  }
}

std::shared_ptr<Operation> Transport::start(const Group& group, const Header& header, std::span<const Fabric::Span> send,
                                            std::span<const Fabric::Span> receive) {
  auto operation = std::make_shared<Operation>(group, header, send, receive);
  {
    const Lock lock = take_lock();
    if (const Failure* failure = failure_of(group)) throw_error(ErrorCode::kPeerFailed, failure->reason);
    pending_.push_back(operation);
  }
  wake_.notify_one();
  return operation;
}

void Transport::wait(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (!operation->done()) {
    std::uint64_t known = 0;
    {
      Lock lock(mutex_, std::defer_lock);
      if (stuck_ || !lock.try_lock_for(kPatience)) throw_stuck(*operation, timeout);
      if (operation->done()) return;
      if (const Failure* failure = failure_of(operation->group())) {
        const Failure copy = *failure;
        lock.unlock();
        // Until the progress thread has abandoned the operation, MPI may still write into the caller's buffers.
        std::unique_lock news(news_mutex_);
        changed_.wait_for(news, 1s, [&] { return operation->dropped() || operation->done(); });
        throw Error(copy.code, copy.reason);
      }
      if (Clock::now() >= deadline) {
        const Group& group = operation->group();
        const std::vector<int> silent = operation->peers_without_envelope();
        const std::vector<int> missing = silent.empty() ? operation->peers_without_payload() : silent;
        fail_locked(group, ErrorCode::kTimeout,
                    fmt::format("rank {} waited {} ms for rank {} in {}: expected {} of {} peers, saw {}", group.rank, timeout.count(), list(missing),
                                operation->describe(), silent.empty() ? "the payload" : "a call", group.world_ranks.size() - 1,
                                group.world_ranks.size() - 1 - missing.size()));
        continue;
      }
      known = num_failures_;
    }
    std::unique_lock news(news_mutex_);
    changed_.wait_until(news, deadline, [&] { return operation->done() || num_failures_ != known; });
  }
}

}  // namespace waybill::mpi
