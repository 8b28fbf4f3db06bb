// SPDX-License-Identifier: Apache-2.0
#include "fabric/threads/hub.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace waybill::threads {

void copy_host(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

Hub::Hub(int P, std::string name, Topology topology, FabricOptions options, CopyBytes copy)
    : size_(P), name_(std::move(name)), topology_(std::move(topology)), options_(options), copy_(copy), left_(static_cast<std::size_t>(P), 0) {}

std::string Hub::describe(const Signature& signature) const {
  std::string text = fmt::format("{}, phase '{}'", to_string(signature.kind), signature.phase);
  if (signature.bytes > 0) text += fmt::format(", {} bytes", signature.bytes);
  if (signature.kind == Collective::kBroadcast) text += fmt::format(", root {}", signature.detail);
  return text;
}

void Hub::throw_if_failed(Lock&) {
  if (failed_) throw_error(code_, reason_);
}

// Wakes everybody: each waiter looks at failed_ first. Locks are taken parent before child, everywhere.
void Hub::fail_locked(Lock&, ErrorCode code, std::string reason) {
  if (failed_) return;
  for (const auto& child : children_) {
    if (const std::shared_ptr<Hub> hub = child.lock()) hub->fail(code, reason);
  }
  failed_ = true;
  code_ = code;
  reason_ = std::move(reason);
  for (const auto& operation : operations_) {
    for (Operation::Entry& entry : operation->entries) entry.changed.notify_all();
  }
}

void Hub::fail(ErrorCode code, const std::string& reason) noexcept {
  try {
    Lock lock(mutex_);
    fail_locked(lock, code, reason);
  } catch (...) {  // out of memory while reporting a failure: the peers' timeouts remain
  }
}

void Hub::leave(int rank) noexcept {
  const std::lock_guard guard(mutex_);
  left_[static_cast<std::size_t>(rank)] = 1;
  for (const auto& operation : operations_) {
    if (operation->entries[static_cast<std::size_t>(rank)].posted) continue;
    for (Operation::Entry& entry : operation->entries) entry.changed.notify_all();
  }
}

Operation& Hub::find(std::uint64_t sequence) { return *operations_[static_cast<std::size_t>(sequence - first_sequence_)]; }

// The operation of `sequence`, made by the first rank that comes. A rank that comes with another signature fails the group.
Operation& Hub::open(Lock& lock, int rank, std::uint64_t sequence, Signature&& signature) {
  throw_if_failed(lock);
  while (sequence - first_sequence_ >= operations_.size()) {
    std::unique_ptr<Operation> fresh;
    if (spare_.empty()) {
      fresh = std::make_unique<Operation>();
      fresh->entries = std::vector<Operation::Entry>(static_cast<std::size_t>(size_));
    } else {
      fresh = std::move(spare_.back());
      spare_.pop_back();
    }
    fresh->sequence = first_sequence_ + operations_.size();
    fresh->signature_rank = -1;
    fresh->posted = fresh->finished = 0;
    fresh->pairwise = false;
    for (Operation::Entry& entry : fresh->entries) entry.posted = false;
    operations_.push_back(std::move(fresh));
  }
  Operation& operation = find(sequence);
  if (operation.signature_rank < 0) {
    operation.signature_rank = rank;
    operation.signature = std::move(signature);
  } else if (!(operation.signature == signature)) {
    fail_locked(lock, ErrorCode::kInvalidArgument,
                fmt::format("group '{}', collective {}: rank {} called {}, but rank {} called {}", name_, sequence, rank, describe(signature),
                            operation.signature_rank, describe(operation.signature)));
    throw_if_failed(lock);
  }
  return operation;
}

void Hub::note_posted(Lock&, Operation& operation, int rank) {
  operation.entries[static_cast<std::size_t>(rank)].posted = true;
  if (++operation.posted == size_) {
    for (Operation::Entry& entry : operation.entries) entry.changed.notify_all();
  }
}

const Operation& Hub::post_small(int rank, std::uint64_t sequence, Signature signature, const void* data, std::size_t bytes) {
  Lock lock(mutex_);
  Operation& operation = open(lock, rank, sequence, std::move(signature));
  if (operation.posted == 0) operation.storage.resize(bytes * static_cast<std::size_t>(size_));
  if (bytes > 0) std::memcpy(operation.storage.data() + bytes * static_cast<std::size_t>(rank), data, bytes);
  note_posted(lock, operation, rank);
  return operation;
}

void Hub::wait_posted(int rank, std::uint64_t sequence) {
  Lock lock(mutex_);
  wait_posted(lock, find(sequence), rank);
}

void Hub::wait_posted(Lock& lock, Operation& operation, int rank) {
  const auto deadline = Clock::now() + options_.timeout;
  std::condition_variable& changed = operation.entries[static_cast<std::size_t>(rank)].changed;
  while (operation.posted < size_) {
    throw_if_failed(lock);
    for (int peer = 0; peer < size_; ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      if (left_[p] != 0 && !operation.entries[p].posted) {
        fail_locked(lock, ErrorCode::kPeerFailed,
                    fmt::format("group '{}': rank {} waits in {} (collective {}), but rank {} has left the group", name_, rank, describe(operation.signature),
                                operation.sequence, peer));
        throw_if_failed(lock);
      }
    }
    if (changed.wait_until(lock, deadline) == std::cv_status::timeout && operation.posted < size_) {
      time_out(lock, operation, rank, "ranks to arrive", size_, operation.posted);
    }
  }
  throw_if_failed(lock);
}

void Hub::time_out(Lock& lock, const Operation& operation, int rank, const char* stage, int expected, int seen) {
  std::string missing;
  for (int peer = 0; peer < size_; ++peer) {
    const Operation::Entry& entry = operation.entries[static_cast<std::size_t>(peer)];
    const bool late = operation.posted < size_ ? !entry.posted : peer != rank && entry.claims > 0;
    if (late) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", peer);
  }
  // The peers that still wait did not time out themselves: they see kPeerFailed with the same text.
  const std::string text =
      fmt::format("timeout after {} ms: rank {} of group '{}' waited in {} (collective {}) for rank(s) {}: expected {} {}, seen {}", options_.timeout.count(),
                  rank, name_, describe(operation.signature), operation.sequence, missing, expected, stage, seen);
  fail_locked(lock, ErrorCode::kPeerFailed, text);
  throw_error(ErrorCode::kTimeout, text);
}

void Hub::finish(std::uint64_t sequence) {
  Lock lock(mutex_);
  finish(lock, find(sequence));
}

// The last rank to finish recycles the operation. Operations finish out of order at most by the number that are pending.
void Hub::finish(Lock&, Operation& operation) {
  if (++operation.finished < size_) return;
  operation.groups.clear();
  while (!operations_.empty() && operations_.front()->finished == size_) {
    spare_.push_back(std::move(operations_.front()));
    operations_.pop_front();
    ++first_sequence_;
  }
}

Hub::Membership Hub::split(int rank, std::uint64_t sequence, int colour, int key, std::string_view group_name) {
  const int mine[2] = {colour, key};
  post_small(rank, sequence, Signature{Collective::kSplit, std::string(group_name), sizeof(mine), 0}, mine, sizeof(mine));
  Lock lock(mutex_);
  Operation& operation = find(sequence);
  wait_posted(lock, operation, rank);
  if (operation.groups.empty()) make_groups(operation, group_name);
  const auto r = static_cast<std::size_t>(rank);
  Membership membership{operation.groups[r], operation.group_ranks[r]};
  finish(lock, operation);
  return membership;
}

void Hub::make_groups(Operation& operation, std::string_view group_name) {
  struct Member {
    int key, rank;
  };
  std::map<int, std::vector<Member>> colours;
  for (int r = 0; r < size_; ++r) {
    int posted[2];
    std::memcpy(posted, operation.storage.data() + sizeof(posted) * static_cast<std::size_t>(r), sizeof(posted));
    if (posted[0] >= 0) colours[posted[0]].push_back(Member{posted[1], r});
  }
  operation.groups.assign(static_cast<std::size_t>(size_), nullptr);
  operation.group_ranks.assign(static_cast<std::size_t>(size_), 0);
  std::erase_if(children_, [](const std::weak_ptr<Hub>& child) { return child.expired(); });
  for (auto& [colour, members] : colours) {
    std::stable_sort(members.begin(), members.end(), [](const Member& a, const Member& b) { return a.key < b.key; });
    Topology topology;
    for (const Member& member : members) {
      topology.node_of.push_back(topology_.node_of[static_cast<std::size_t>(member.rank)]);
      topology.domain_of.push_back(topology_.domain_of[static_cast<std::size_t>(member.rank)]);
    }
    const auto hub =
        std::make_shared<Hub>(static_cast<int>(members.size()), fmt::format("{}/{}.{}", name_, group_name, colour), std::move(topology), options_, copy_);
    children_.push_back(hub);
    for (std::size_t i = 0; i < members.size(); ++i) {
      operation.groups[static_cast<std::size_t>(members[i].rank)] = hub;
      operation.group_ranks[static_cast<std::size_t>(members[i].rank)] = static_cast<int>(i);
    }
  }
}

}  // namespace waybill::threads
