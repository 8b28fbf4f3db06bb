// SPDX-License-Identifier: Apache-2.0
// Which process of a group is gone. NCCL over sockets does not say whom it waits for, and its kernels wait for a dead process for ever; so ranks keep TCP
// connections of their own, one to each rank of the node and of the rail. The end of a process ends its connections at once, whatever its GPU does; a
// rank that finds one lost tells its neighbours, who tell theirs. Host only; polled by the rank's own thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "fabric/nccl/nccl_rendezvous.h"
#include "fabric/nccl/nccl_socket.h"
#include "waybill/fabric.h"

namespace waybill::cuda {

class Lifeline {
 public:
  // Collective over `fabric`. The address that peers connect to is the one this host has towards rank 0. kTimeout naming the peer that did not come.
  Lifeline(Fabric& fabric, const ProcessRank& self, int ranks_per_node, std::chrono::milliseconds timeout);
  ~Lifeline();  // tells the neighbours that this rank leaves in order
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

  // A rank that is lost, or -1; reads what has come and does not wait. A rank that has left in order is not lost. The first loss stands.
  int lost();
  // Why: its process has ended, or it did not answer a neighbour (which is this rank, or has told so). The lost rank may be this one: others gave it up.
  bool has_ended() const { return has_ended_; }
  // Tells the neighbours that `rank` is lost; once.
  void tell(int rank, bool has_ended) noexcept;
  // Neighbours that have left, or do not answer within `patience`: stopped, or not waiting in lost() themselves. Where all answer, waits as long again for
  // the word of one that knows of a silent rank further away: lost() then has it.
  std::vector<int> silent(std::chrono::milliseconds patience);

 private:
  enum Kind : std::int32_t { kLeaves = 1, kEnded, kAsks, kAnswers, kSilent };
  struct Message {
    std::int32_t kind, rank;
  };
  struct Peer {
    int rank = 0;
    Socket socket;
    Message message{};  // of which `have` bytes have come
    std::size_t have = 0;
    bool has_left = false, has_answered = false;
  };
  void connect(const std::vector<std::uint64_t>& addresses, std::chrono::milliseconds timeout, const Socket& listener);
  bool read(Peer& peer);
  bool lose(int rank, bool has_ended);
  static void send(Peer& peer, Message message) noexcept;

  int rank_, ranks_per_node_, size_, lost_ = -1;
  bool has_told_ = false, has_ended_ = false;
  std::vector<Peer> peers_;
};

}  // namespace waybill::cuda
