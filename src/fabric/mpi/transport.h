// SPDX-License-Identifier: Apache-2.0
// The process's one connection to MPI: a lock around every MPI call, the thread that moves pending operations, and the failures
// of groups that peers report. MPI itself may never return from a call that touches a dead peer, so nobody waits for the lock without
// a limit: after that the transport counts as stuck, says so, and is not used any more. Data and failures are sent by the thread only,
// so that it alone can get caught in such a call.
#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fabric/mpi/operation.h"
#include "fabric/mpi/timed_mutex.h"

namespace waybill::mpi {

class Transport {
 public:
  static std::shared_ptr<Transport> get();  // initialises MPI on the first call
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int world_rank() const { return world_rank_; }
  int world_size() const { return world_size_; }

  std::shared_ptr<Operation> start(const Group& group, const Header& header, std::span<const Fabric::Span> send, std::span<const Fabric::Span> receive);
  void wait(const std::shared_ptr<Operation>& operation, std::chrono::milliseconds timeout);
  // Peers learn of it through a message and stop waiting; children of the group fail too.
  void fail(const Group& group, ErrorCode code, const std::string& reason) noexcept;
  // Says that this rank makes no further call in the group.
  void leave(const Group& group) noexcept;

  // Ids of groups are unique within every process that is a member.
  int next_group_id() const { return next_group_id_; }
  int agree_on_group_id();  // the largest next_group_id() of all processes; collective over the world, made once per world group
  void reserve_group_ids(int end) { next_group_id_ = std::max(next_group_id_, end); }

 private:
  Transport();
  using Lock = std::unique_lock<TimedMutex>;
  Lock take_lock();  // throws when stuck
  [[noreturn]] void throw_stuck(const Operation& operation, std::chrono::milliseconds timeout);
  struct Failure {
    ErrorCode code;
    std::string reason;
  };
  struct Outgoing {  // a control message on its way
    MPI_Request request = MPI_REQUEST_NULL;
    int world_rank = 0;
    bool sent = false;
    std::vector<char> bytes;
  };
  bool stop() noexcept;  // ends the thread; false when it does not end
  void run();
  void send_outgoing();
  void tell_waiters();
  bool progress_once();
  void read_control();
  void send_control(const Group& group, ErrorCode code, const std::string& reason);
  void fail_locked(const Group& group, ErrorCode code, const std::string& reason);
  bool everybody_is_here();
  const Failure* failure_of(const Group& group) const;

  int world_rank_ = 0, world_size_ = 1;
  MPI_Comm data_ = MPI_COMM_NULL, control_ = MPI_COMM_NULL;
  bool owns_mpi_ = false;
  int next_group_id_ = 1;

  TimedMutex mutex_;
  std::atomic<bool> stuck_{false};
  std::condition_variable_any wake_;
  std::mutex news_mutex_;  // of changed_ only; never held together with a call into MPI
  std::condition_variable changed_;
  std::atomic<std::uint64_t> num_failures_{0};
  std::list<std::shared_ptr<Operation>> pending_;
  std::vector<std::shared_ptr<Operation>> abandoned_;  // MPI may still read their envelopes
  std::list<Outgoing> outgoing_;
  std::list<std::pair<MPI_Request, std::vector<std::byte>>> leaving_;
  std::map<int, Failure> failures_;  // by group id
  std::size_t num_unsent_ = 0;       // of outgoing_
  bool stopping_ = false;
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

}  // namespace waybill::mpi
