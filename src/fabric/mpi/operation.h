// SPDX-License-Identifier: Apache-2.0
// One pairwise collective of the mpi engine as a state machine: an envelope to and from every peer, then the payload. Envelopes
// carry the sizes a rank sends to and expects from everybody, and payload is only received after all of them agreed: a mismatch
// between any two ranks is named on every rank, and no buffer is overrun.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "fabric/collective.h"
#include "waybill/fabric.h"

namespace waybill::mpi {

// Start of every envelope; the sizes sent to each rank [P] and expected from each rank [P], u64, follow. Plain data; all ranks run
// the same build (checked through `magic`).
struct Header {
  static constexpr std::size_t kPhaseBytes = 40;
  static constexpr std::uint64_t kMagic = 0x5742'6d70'6900'0001ull;
  std::uint64_t magic = kMagic;
  std::uint64_t sequence = 0;
  Collective kind = Collective::kBarrier;
  std::int32_t detail = 0;
  std::uint64_t signature_bytes = 0;  // what every rank must agree on; 0 where sizes may differ
  char phase[kPhaseBytes] = {};
};

static_assert(sizeof(Header) % sizeof(std::uint64_t) == 0);

struct Group {
  int id = 0;
  std::string name;
  std::vector<int> world_ranks;  // [P]
  int rank = 0;
  std::vector<int> ancestors;  // ids of the groups this one was split from
};

class Operation {
 public:
  Operation(const Group& group, Header header, std::span<const Fabric::Span> send, std::span<const Fabric::Span> receive);

  // All MPI calls are made by the owner under its lock. Each throws Error on a mismatch or a failed MPI call.
  void start(MPI_Comm communicator);
  bool started() const { return !envelope_.empty(); }
  bool progress(MPI_Comm communicator);  // true when everything has moved
  void abandon() noexcept;               // after a failure: receives are cancelled, nothing is waited for
  // Readable without the owner's lock.
  bool done() const { return done_; }
  bool dropped() const { return dropped_; }  // abandoned: MPI no longer touches the caller's buffers
  std::vector<int> peers_not_heard() const;  // peers_without_envelope() as far as this thread can see

  std::string describe() const;                     // "all_to_all 'rows' (collective 7 of group 'world')"
  std::vector<int> peers_without_envelope() const;  // group ranks
  std::vector<int> peers_without_payload() const;
  const Group& group() const { return group_; }
  static int header_tag_of(const Group& group) { return group.id * kTagsPerGroup; }

 private:
  struct Peer {
    std::vector<std::uint64_t> envelope;  // incoming
    MPI_Request envelope_receive = MPI_REQUEST_NULL;
    std::vector<MPI_Request> sends, receives;
    bool envelope_seen = false, complete = false;
  };
  const Header& header_of(const Peer& peer) const { return *reinterpret_cast<const Header*>(peer.envelope.data()); }
  std::size_t envelope_bytes() const { return sizeof(Header) + 2 * sizeof(std::uint64_t) * peers_.size(); }
  std::vector<std::uint64_t> make_envelope() const;
  void check_headers() const;
  void check_sizes() const;
  bool receive_envelopes(MPI_Comm communicator);
  bool progress_peer(Peer& state) const;
  void transfer(bool sending, int peer, MPI_Comm communicator);
  int header_tag() const { return header_tag_of(group_); }
  int payload_tag() const { return header_tag() + 1 + static_cast<int>(header_.sequence % (kTagsPerGroup - 1)); }

  // Payload tags rotate by sequence, so that the payloads of several pending operations of one pair cannot be mixed up.
  static constexpr int kTagsPerGroup = 128;

  Group group_;
  Header header_;
  std::vector<Fabric::Span> send_, receive_;
  std::vector<Peer> peers_;
  std::vector<std::uint64_t> envelope_;  // outgoing, the same for every peer
  bool agreed_ = false;
  std::atomic<bool> done_{false}, dropped_{false};
  std::vector<std::atomic<bool>> heard_;  // [P]
};

void check_mpi(int code, const char* call, const std::string& where);

}  // namespace waybill::mpi
