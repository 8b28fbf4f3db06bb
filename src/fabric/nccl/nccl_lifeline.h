// SPDX-License-Identifier: Apache-2.0
// Which process of a group is gone. NCCL over sockets does not say whom it waits for, and its kernels wait for a dead process for ever; so ranks keep TCP
// connections of their own, one to each rank of the node and of the rail. The end of a process ends its connections at once, whatever its GPU does; a
// rank that finds one lost tells its neighbours, who tell theirs. Host only. Any thread may call it; none of its own: who waits polls lost().
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "fabric/nccl/nccl_rendezvous.h"
#include "fabric/nccl/nccl_socket.h"
#include "waybill/fabric.h"

namespace waybill::cuda {

// kEnded: its process has. kSilent: it did not answer a neighbour (stopped, or has left). kLate: it answers, but did not come to what others wait in.
enum class Loss : std::int32_t { kEnded, kSilent, kLate };

class Lifeline {
 public:
  // Collective over `fabric`. The address that peers connect to is the one this host has towards rank 0. kTimeout naming the peer that did not come.
  Lifeline(Fabric& fabric, const ProcessRank& self, int ranks_per_node, std::chrono::milliseconds timeout);
  ~Lifeline();  // tells the neighbours that this rank leaves in order
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

  // A rank that is lost, or -1; reads what has come, answers, and does not wait. A rank that has left in order is not lost. The first loss stands.
  int lost();
  // Why, as this rank found or was told. The lost rank may be this one: others gave it up.
  Loss loss() const;
  // Tells the neighbours that `rank` is lost; once.
  void tell(int rank, Loss why) noexcept;
  // How far this rank has come: a count that grows in the same way on every rank of the group. What it answers.
  void report(std::uint32_t progress);

  struct Answers {
    std::vector<int> silent;  // neighbours that have left, or do not answer within the patience
    std::vector<int> late;    // that answer, but have come less far than this rank; the latest first
  };
  // Asks the neighbours. Where all answer and none is late, waits as long again for the word of one that knows of a rank further away: lost() then has it.
  Answers ask(std::chrono::milliseconds patience);

 private:
  enum Kind : std::int32_t { kLeaves = 1, kAsks, kAnswers, kIsLost };
  struct Message {
    std::int32_t kind, rank;   // kAnswers: its progress instead of a rank
    std::int32_t why, unused;  // of kIsLost
  };
  struct Peer {
    int rank = 0;
    Socket socket;
    Message message{};  // of which `have` bytes have come
    std::size_t have = 0;
    bool has_left = false, has_answered = false;
    std::uint32_t progress = 0;
  };
  void connect(const std::vector<std::uint64_t>& addresses, std::chrono::milliseconds timeout, const Socket& listener);
  bool read(Peer& peer);
  bool lose(int rank, Loss why);
  int look();
  static void send(Peer& peer, Message message) noexcept;

  const int rank_, ranks_per_node_, size_;
  mutable std::mutex mutex_;  // of all that follows
  int lost_ = -1;
  Loss loss_ = Loss::kEnded;
  bool has_told_ = false;
  std::uint32_t progress_ = 0;
  std::vector<Peer> peers_;
};

}  // namespace waybill::cuda
