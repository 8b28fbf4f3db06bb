// SPDX-License-Identifier: Apache-2.0
// Who gives a group up, and what for. Kernels of NCCL wait for a lost rank without a timeout, and a caller that waits for its stream by CUDA's own calls asks
// nobody: a thread of the world's asks for it. It reads the lifeline, NCCL's own error and two words that the rail's kernels count in host memory; where a
// rank is lost, or messages stand for longer than the timeout, it keeps the verdict, poisons kernels of ours and aborts the communicator, which ends NCCL's.
// A caller that has filled the device's queue may hold CUDA's locks until then, so nothing on the way to the abort waits for a call of CUDA.
// Needs no GPU itself: what touches the device are the two hooks.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <thread>

#include "fabric/nccl/nccl_comm.h"
#include "fabric/nccl/nccl_library.h"
#include "fabric/nccl/nccl_lifeline.h"

namespace waybill::cuda {

// In host memory that the device reaches: calls of the rail that the device has come to, and is through with; not 0 once the group is given up.
struct RailProgress {
  std::uint32_t begun, ended, is_lost;
};

class NcclWatch {
 public:
  struct Hooks {
    std::function<void()> enter_thread;  // first thing of a thread that calls CUDA or NCCL: its device, and a capture mode that disturbs no capture
    std::function<void()> poison;        // kernels of ours that wait inside the node leave; any thread, does not wait for long
  };
  // nccl and comm must outlive it.
  NcclWatch(const NcclLibrary& nccl, NcclComm& comm, int rank, int size, Hooks hooks);
  ~NcclWatch();  // stop()
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  // Several nodes: from now on a thread looks every 10 ms. lifeline and progress must stay until stop(). timeout: of messages that the device has come to.
  void start(Lifeline& lifeline, int ranks_per_node, RailProgress& progress, std::chrono::nanoseconds timeout);
  // The thread ends; idempotent. By itself at the process's exit(), before CUDA and NCCL end: a process that goes while others have gone gives nothing up.
  void stop();

  // True once the group is given up, by whoever found the loss. Looks now.
  bool is_lost() noexcept;
  // kPeerFailed or kTimeout, "rank 0 of 2: WHAT: rank 1 of node 1 is lost, its process has ended"; one load where nothing is lost. Does not look.
  void throw_if_lost(const char* what) const {
    if (is_given_up_.load(std::memory_order_acquire)) throw_lost(what);
  }
  [[noreturn]] void throw_lost(const char* what) const;

  // A host collective begins: part of how far this rank has come.
  void count_collective() { collectives_.fetch_add(1, std::memory_order_relaxed); }
  // Each gives the group up unless that has happened. NCCL refused a call, or knows of an error:
  void refuse(ncclResult_t error);
  // Something took longer than `timeout`: asks the neighbours who is late.
  void time_out(std::chrono::nanoseconds timeout);
  void give_up(ErrorCode code, const std::string& text);
  // Waits for the abort that a give_up has begun. It lasts until graphs that hold messages are destroyed.
  bool has_aborted_within(std::chrono::nanoseconds patience) const;

 private:
  void watch(std::chrono::nanoseconds timeout);
  void end_thread();
  static void end_all() noexcept;
  std::string name(int rank) const;
  std::string loss(ncclResult_t error);
  RailProgress progress() const;
  void report();

  const NcclLibrary& nccl_;
  NcclComm& comm_;
  const int rank_, size_;
  int ranks_per_node_ = 1;
  Hooks hooks_;
  Lifeline* lifeline_ = nullptr;
  RailProgress* progress_ = nullptr;
  std::atomic<std::uint32_t> collectives_{0};

  std::mutex deciding_;  // one gives the group up; of what follows
  ErrorCode code_ = ErrorCode::kPeerFailed;
  std::string text_;
  std::shared_future<void> aborted_;
  std::atomic<bool> is_given_up_{false};  // behind it the three do not change

  std::mutex asking_;
  std::mutex stopping_;
  std::condition_variable stop_;
  bool is_stopped_ = false;
  std::thread thread_;
};

}  // namespace waybill::cuda
