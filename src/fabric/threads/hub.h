// SPDX-License-Identifier: Apache-2.0
// The meeting point of one group of the threads engine. Ranks post operations under one mutex; bytes are copied outside of it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "fabric/collective.h"
#include "waybill/fabric.h"

namespace waybill::threads {

// What every rank must agree on for one collective. `bytes`, `detail` (reduction, root): 0 where they may differ.
struct Signature {
  Collective kind = Collective::kBarrier;
  std::string phase;
  std::size_t bytes = 0;
  int detail = 0;
  friend bool operator==(const Signature&, const Signature&) = default;
};

class Hub;

// Moves bytes between the buffers of two ranks. The engine's own is memcpy; engines built on this one whose buffers need not be host
// memory bring another. It may throw.
using CopyBytes = void (*)(void* to, const void* from, std::size_t bytes);
void copy_host(void* to, const void* from, std::size_t bytes);

// One collective. Two kinds: small ones copy every rank's bytes into `storage` when they are posted and out when all have come;
// pairwise ones post spans, and each (sender, receiver) pair is copied by whichever of the two waits first.
struct Operation {
  enum class Pair : std::uint8_t { kOpen, kClaimed, kDone };
  struct Entry {
    bool posted = false;
    std::vector<Fabric::Span> send, receive;  // pairwise
    int pairs_left = 0;                       // pairs with this rank on either side that are not done
    int claims = 0;                           // pairs with this rank on either side that are being copied right now
    std::vector<std::size_t> claimed;         // scratch of the rank that copies
    std::condition_variable changed;
  };

  std::uint64_t sequence = 0;
  Signature signature;
  int signature_rank = -1;
  bool pairwise = false;
  int posted = 0, finished = 0;
  std::vector<Entry> entries;                // [P]
  std::vector<Pair> pairs;                   // [P * P], sender major; pairwise
  std::vector<std::byte> storage;            // [P * bytes]; small
  std::vector<std::shared_ptr<Hub>> groups;  // split: [P], null for colour < 0
  std::vector<int> group_ranks;              // split: [P]
};

class Hub {
 public:
  Hub(int P, std::string name, Topology topology, FabricOptions options, CopyBytes copy = copy_host);

  int size() const { return size_; }
  const std::string& name() const { return name_; }
  const Topology& topology() const { return topology_; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }

  // Small collective: post `bytes` bytes at `data`, wait for all ranks, then call `read(storage)`, P * bytes bytes in rank order.
  template <class Read>
  void gather_small(int rank, std::uint64_t sequence, Signature signature, const void* data, std::size_t bytes, const Read& read) {
    const Operation& operation = post_small(rank, sequence, std::move(signature), data, bytes);
    wait_posted(rank, sequence);
    read(operation.storage.data());
    finish(sequence);
  }
  void post_pairwise(int rank, std::uint64_t sequence, Signature signature, std::span<const Fabric::Span> send, std::span<const Fabric::Span> receive);
  void wait_pairwise(int rank, std::uint64_t sequence);
  // A pending operation whose buffers are about to die: fails the group, returns when nobody touches them any more.
  void withdraw(int rank, std::uint64_t sequence) noexcept;

  struct Membership {
    std::shared_ptr<Hub> hub;  // null: not a member
    int rank = 0;
  };
  Membership split(int rank, std::uint64_t sequence, int colour, int key, std::string_view group_name);

  // The first failure stays; children fail too. code: what pending and later calls of the ranks throw.
  void fail(ErrorCode code, const std::string& reason) noexcept;
  void leave(int rank) noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;

  Operation& open(Lock& lock, int rank, std::uint64_t sequence, Signature&& signature);
  Operation& find(std::uint64_t sequence);
  void note_posted(Lock& lock, Operation& operation, int rank);
  const Operation& post_small(int rank, std::uint64_t sequence, Signature signature, const void* data, std::size_t bytes);
  void wait_posted(int rank, std::uint64_t sequence);
  void wait_posted(Lock& lock, Operation& operation, int rank);
  bool copy_claims(Lock& lock, Operation& operation, int rank, bool as_receiver, std::size_t limit);
  void check_sizes(Lock& lock, const Operation& operation, int rank);
  void finish(std::uint64_t sequence);
  void finish(Lock& lock, Operation& operation);
  void make_groups(Operation& operation, std::string_view group_name);
  [[noreturn]] void time_out(Lock& lock, const Operation& operation, int rank, const char* stage, int expected, int seen);
  void throw_if_failed(Lock& lock);
  void fail_locked(Lock& lock, ErrorCode code, std::string reason);
  std::string describe(const Signature& signature) const;

  const int size_;
  const std::string name_;
  const Topology topology_;
  const FabricOptions options_;
  const CopyBytes copy_;  // of pairwise collectives

  std::mutex mutex_;
  // Live operations, oldest first; the sequence number of the front is first_sequence_. Finished ones are reused.
  std::deque<std::unique_ptr<Operation>> operations_;
  std::uint64_t first_sequence_ = 0;
  std::vector<std::unique_ptr<Operation>> spare_;
  std::vector<char> left_;
  bool failed_ = false;
  ErrorCode code_ = ErrorCode::kInternal;
  std::string reason_;
  std::vector<std::weak_ptr<Hub>> children_;
};

}  // namespace waybill::threads
