// SPDX-License-Identifier: Apache-2.0
// The pairwise operations of a hub: (sender, receiver) pairs are claimed under the mutex and copied outside of it.
#include <exception>

#include "fabric/threads/hub.h"

namespace waybill::threads {

void Hub::post_pairwise(int rank, std::uint64_t sequence, Signature signature, std::span<const Fabric::Span> send, std::span<const Fabric::Span> receive) {
  Lock lock(mutex_);
  Operation& operation = open(lock, rank, sequence, std::move(signature));
  const auto P = static_cast<std::size_t>(size_);
  if (operation.posted == 0) {
    operation.pairwise = true;
    operation.pairs.assign(P * P, Operation::Pair::kOpen);
  }
  Operation::Entry& entry = operation.entries[static_cast<std::size_t>(rank)];
  entry.send.assign(send.begin(), send.end());
  entry.receive.assign(receive.begin(), receive.end());
  entry.pairs_left = 2 * size_;  // the pair with itself counts on both sides
  entry.claims = 0;
  entry.posted = true;  // check_sizes looks at posted ranks, this one included
  check_sizes(lock, operation, rank);
  note_posted(lock, operation, rank);
}

// Before the last rank's post is counted nobody can leave the wait, so a mismatch reaches every rank and no byte moves.
void Hub::check_sizes(Lock& lock, const Operation& operation, int rank) {
  const auto check = [&](int from, int to) {
    const std::size_t sent = operation.entries[static_cast<std::size_t>(from)].send[static_cast<std::size_t>(to)].bytes;
    const std::size_t expected = operation.entries[static_cast<std::size_t>(to)].receive[static_cast<std::size_t>(from)].bytes;
    if (sent == expected) return;
    fail_locked(lock, ErrorCode::kInvalidArgument,
                fmt::format("group '{}', {} (collective {}): rank {} sends {} bytes to rank {}, which expects {} bytes", name_, describe(operation.signature),
                            operation.sequence, from, sent, to, expected));
    throw_if_failed(lock);
  };
  for (int peer = 0; peer < size_; ++peer) {
    if (!operation.entries[static_cast<std::size_t>(peer)].posted) continue;
    check(rank, peer);
    check(peer, rank);
  }
}

// Copies up to `limit` open pairs with this rank as receiver (or as sender); false where none is open. The lock is released
// while bytes move.
bool Hub::copy_claims(Lock& lock, Operation& operation, int rank, bool as_receiver, std::size_t limit) {
  const auto P = static_cast<std::size_t>(size_);
  const auto me = static_cast<std::size_t>(rank);
  std::vector<std::size_t>& claimed = operation.entries[me].claimed;  // peers
  claimed.clear();
  for (std::size_t i = 1; i <= P && claimed.size() < limit; ++i) {
    const std::size_t peer = (me + i) % P;  // start at the next rank: not all ranks read rank 0 first
    Operation::Pair& pair = operation.pairs[as_receiver ? peer * P + me : me * P + peer];
    if (pair != Operation::Pair::kOpen) continue;
    pair = Operation::Pair::kClaimed;
    ++operation.entries[me].claims;
    ++operation.entries[peer].claims;
    claimed.push_back(peer);
  }
  if (claimed.empty()) return false;
  lock.unlock();
  std::exception_ptr error;  // a copy that throws ends this rank's wait, which fails the group
  for (const std::size_t peer : claimed) {
    const std::size_t from = as_receiver ? peer : me, to = as_receiver ? me : peer;
    const Fabric::Span& source = operation.entries[from].send[to];
    const Fabric::Span& target = operation.entries[to].receive[from];
    if (source.bytes == 0 || source.data == target.data || error != nullptr) continue;
    try {
      copy_(target.data, source.data, source.bytes);
    } catch (...) {
      error = std::current_exception();
    }
  }
  lock.lock();
  for (const std::size_t peer : claimed) {
    operation.pairs[as_receiver ? peer * P + me : me * P + peer] = Operation::Pair::kDone;
    for (const std::size_t side : {me, peer}) {
      Operation::Entry& entry = operation.entries[side];
      --entry.claims;
      // A rank that waits also wakes when its last claim ends after a failure (withdraw).
      if (--entry.pairs_left == 0 || (failed_ && entry.claims == 0)) entry.changed.notify_all();
    }
  }
  if (error != nullptr) std::rethrow_exception(error);
  return true;
}

void Hub::wait_pairwise(int rank, std::uint64_t sequence) {
  Lock lock(mutex_);
  throw_if_failed(lock);
  Operation& operation = find(sequence);
  wait_posted(lock, operation, rank);
  const auto everything = static_cast<std::size_t>(size_);
  copy_claims(lock, operation, rank, true, everything);
  // What peers have not fetched yet is pushed one by one: they may be busy elsewhere, and this rank need not wait for them.
  Operation::Entry& entry = operation.entries[static_cast<std::size_t>(rank)];
  while (!failed_ && copy_claims(lock, operation, rank, false, 1)) {
  }
  const auto deadline = Clock::now() + options_.timeout;
  while (entry.pairs_left > 0) {
    throw_if_failed(lock);
    if (entry.changed.wait_until(lock, deadline) == std::cv_status::timeout && entry.pairs_left > 0) {
      time_out(lock, operation, rank, "pairs of ranks to be copied", 2 * size_, 2 * size_ - entry.pairs_left);
    }
  }
  finish(lock, operation);
}

void Hub::withdraw(int rank, std::uint64_t sequence) noexcept {
  try {
    Lock lock(mutex_);
    if (sequence < first_sequence_ || sequence - first_sequence_ >= operations_.size()) return;
    Operation& operation = find(sequence);
    fail_locked(lock, ErrorCode::kPeerFailed,
                fmt::format("group '{}': rank {} gave up a pending {} (collective {})", name_, rank, describe(operation.signature), sequence));
    Operation::Entry& entry = operation.entries[static_cast<std::size_t>(rank)];
    entry.changed.wait(lock, [&] { return entry.claims == 0; });
  } catch (...) {  // only out of memory for the text: nothing is pending then that could be named
  }
}

}  // namespace waybill::threads
