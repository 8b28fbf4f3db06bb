// SPDX-License-Identifier: Apache-2.0
#include "fabric/mpi/operation.h"

#include <algorithm>
#include <cstring>

namespace waybill::mpi {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{1} << 30;  // MPI counts are int

bool test(MPI_Request& request, const std::string& where) {
  if (request == MPI_REQUEST_NULL) return true;
  int flag = 0;
  check_mpi(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), "MPI_Test", where);
  return flag != 0;
}

}  // namespace

void check_mpi(int code, const char* call, const std::string& where) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  WB_FAIL(ErrorCode::kPeerFailed, "{} failed in {}: {}", call, where, std::string_view(text, static_cast<std::size_t>(length)));
}

Operation::Operation(const Group& group, Header header, std::span<const Fabric::Span> send, std::span<const Fabric::Span> receive)
    : group_(group),
      header_(header),
      send_(send.begin(), send.end()),
      receive_(receive.begin(), receive.end()),
      peers_(group.world_ranks.size()),
      heard_(group.world_ranks.size()) {}

std::string Operation::describe() const {
  return fmt::format("{} '{}' (collective {} of group '{}')", to_string(header_.kind), header_.phase, header_.sequence, group_.name);
}

std::vector<std::uint64_t> Operation::make_envelope() const {
  std::vector<std::uint64_t> envelope(envelope_bytes() / sizeof(std::uint64_t));
  std::memcpy(envelope.data(), &header_, sizeof(Header));
  std::uint64_t* sizes = envelope.data() + sizeof(Header) / sizeof(std::uint64_t);
  for (const Fabric::Span& span : send_) *sizes++ = span.bytes;
  for (const Fabric::Span& span : receive_) *sizes++ = span.bytes;
  return envelope;
}

void Operation::start(MPI_Comm communicator) {
  const auto me = static_cast<std::size_t>(group_.rank);
  const int bytes = static_cast<int>(envelope_bytes());
  envelope_ = make_envelope();
  peers_[me].envelope = envelope_;
  peers_[me].envelope_seen = peers_[me].complete = true;
  heard_[me] = true;
  const int P = static_cast<int>(peers_.size());
  for (int i = 1; i < P; ++i) {
    const int peer = (group_.rank + i) % P;  // not every rank talks to rank 0 first
    Peer& state = peers_[static_cast<std::size_t>(peer)];
    const int world_rank = group_.world_ranks[static_cast<std::size_t>(peer)];
    state.envelope.resize(envelope_.size());
    check_mpi(MPI_Irecv(state.envelope.data(), bytes, MPI_BYTE, world_rank, header_tag(), communicator, &state.envelope_receive), "MPI_Irecv", describe());
    state.sends.emplace_back(MPI_REQUEST_NULL);
    check_mpi(MPI_Isend(envelope_.data(), bytes, MPI_BYTE, world_rank, header_tag(), communicator, &state.sends.back()), "MPI_Isend", describe());
    transfer(/*sending=*/true, peer, communicator);
  }
}

void Operation::transfer(bool sending, int peer, MPI_Comm communicator) {
  const Fabric::Span& span = (sending ? send_ : receive_)[static_cast<std::size_t>(peer)];
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  const int world_rank = group_.world_ranks[static_cast<std::size_t>(peer)];
  for (std::size_t offset = 0; offset < span.bytes; offset += kChunkBytes) {
    const int bytes = static_cast<int>(std::min(kChunkBytes, span.bytes - offset));
    std::byte* data = static_cast<std::byte*>(span.data) + offset;
    std::vector<MPI_Request>& requests = sending ? state.sends : state.receives;
    requests.emplace_back(MPI_REQUEST_NULL);
    check_mpi(sending ? MPI_Isend(data, bytes, MPI_BYTE, world_rank, payload_tag(), communicator, &requests.back())
                      : MPI_Irecv(data, bytes, MPI_BYTE, world_rank, payload_tag(), communicator, &requests.back()),
              sending ? "MPI_Isend" : "MPI_Irecv", describe());
  }
}

void Operation::check_headers() const {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    const Header& seen = header_of(peers_[peer]);
    WB_CHECK(seen.magic == Header::kMagic, "{}: rank {} runs another Waybill build", describe(), peer);
    if (seen.kind == Collective::kLeave)
      WB_FAIL(ErrorCode::kPeerFailed, "{}: rank {} waits for rank {}, which has left the group", describe(), group_.rank, peer);
    const bool same = seen.kind == header_.kind && seen.sequence == header_.sequence && seen.detail == header_.detail &&
                      seen.signature_bytes == header_.signature_bytes && std::strncmp(seen.phase, header_.phase, Header::kPhaseBytes) == 0;
    WB_CHECK(same, "{} of {} bytes on rank {}, but rank {} is in {} '{}' (collective {}) of {} bytes", describe(), header_.signature_bytes, group_.rank, peer,
             to_string(seen.kind), seen.phase, seen.sequence, seen.signature_bytes);
  }
}

void Operation::check_sizes() const {
  const std::size_t P = peers_.size();
  constexpr std::size_t kHeaderWords = sizeof(Header) / sizeof(std::uint64_t);
  for (std::size_t from = 0; from < P; ++from) {
    for (std::size_t to = 0; to < P; ++to) {
      const std::uint64_t sent = peers_[from].envelope[kHeaderWords + to];
      const std::uint64_t expected = peers_[to].envelope[kHeaderWords + P + from];
      WB_CHECK(sent == expected, "{}: rank {} sends {} bytes to rank {}, which expects {} bytes", describe(), from, sent, to, expected);
    }
  }
}

bool Operation::receive_envelopes(MPI_Comm communicator) {
  bool all = true;
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    Peer& state = peers_[peer];
    if (!state.envelope_seen) heard_[peer] = state.envelope_seen = test(state.envelope_receive, describe());
    all = all && state.envelope_seen;
  }
  if (!all) return false;
  check_headers();
  check_sizes();
  agreed_ = true;
  const auto me = static_cast<std::size_t>(group_.rank);
  if (send_[me].bytes > 0 && send_[me].data != receive_[me].data) std::memcpy(receive_[me].data, send_[me].data, send_[me].bytes);
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer != group_.rank) transfer(/*sending=*/false, peer, communicator);
  }
  return true;
}

bool Operation::progress_peer(Peer& state) const {
  if (state.complete) return true;
  for (std::vector<MPI_Request>* requests : {&state.receives, &state.sends}) {
    for (MPI_Request& request : *requests) {
      if (!test(request, describe())) return false;
    }
  }
  return state.complete = true;
}

bool Operation::progress(MPI_Comm communicator) {
  if (!agreed_ && !receive_envelopes(communicator)) return false;
  bool all = true;
  for (Peer& state : peers_) all = progress_peer(state) && all;
  done_ = all;
  return all;
}

void Operation::abandon() noexcept {
  const auto drop = [](MPI_Request& request) {
    if (request == MPI_REQUEST_NULL) return;
    MPI_Cancel(&request);
    MPI_Request_free(&request);
  };
  for (Peer& peer : peers_) {
    drop(peer.envelope_receive);
    for (MPI_Request& request : peer.receives) drop(request);
    for (MPI_Request& request : peer.sends) {
      if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    }
  }
  dropped_ = true;
}

std::vector<int> Operation::peers_not_heard() const {
  std::vector<int> missing;
  for (std::size_t p = 0; p < heard_.size(); ++p) {
    if (!heard_[p]) missing.push_back(static_cast<int>(p));
  }
  return missing;
}

std::vector<int> Operation::peers_without_envelope() const {
  std::vector<int> missing;
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    if (!peers_[p].envelope_seen) missing.push_back(static_cast<int>(p));
  }
  return missing;
}

std::vector<int> Operation::peers_without_payload() const {
  std::vector<int> missing;
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    if (!peers_[p].complete) missing.push_back(static_cast<int>(p));
  }
  return missing;
}

}  // namespace waybill::mpi
