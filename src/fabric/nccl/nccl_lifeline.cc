// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_lifeline.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "waybill/error.h"

namespace waybill::cuda {
namespace {

constexpr int kRepeatMs = 10;

// The address of this host that leads to rank 0: a datagram socket is given one without anything being sent.
std::uint32_t own_address(const ProcessRank& self) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_INET, hints.ai_socktype = SOCK_DGRAM;
  WB_CHECK(::getaddrinfo(self.address.c_str(), std::to_string(self.port).c_str(), &hints, &found) == 0, "rank {}: {} is no address", self.rank, self.address);
  const Socket probe(::socket(AF_INET, SOCK_DGRAM, 0));
  sockaddr_in own{};
  socklen_t bytes = sizeof(own);
  const bool known = ::connect(probe.fd(), found->ai_addr, found->ai_addrlen) == 0 && ::getsockname(probe.fd(), reinterpret_cast<sockaddr*>(&own), &bytes) == 0;
  ::freeaddrinfo(found);
  WB_CHECK(known, "rank {} has no way to {}: {}", self.rank, self.address, std::strerror(errno));
  return own.sin_addr.s_addr;
}

// A host that vanishes without closing its connections is noticed after about 20 s.
void keep_alive(int fd) {
  const int on = 1, seconds = 5, probes = 3;
  (void)::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof(seconds));
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof(seconds));
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

Socket connect_to(std::uint64_t address, SocketClock::time_point end) {
  sockaddr_in where{};
  where.sin_family = AF_INET, where.sin_addr.s_addr = static_cast<std::uint32_t>(address >> 16), where.sin_port = static_cast<std::uint16_t>(address & 0xffff);
  while (true) {
    Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
    if (::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) == 0) return socket;
    if (left_ms(end) == 0) return Socket();
    std::this_thread::sleep_for(std::chrono::milliseconds(kRepeatMs));
  }
}

Socket accept_from(const Socket& listener, SocketClock::time_point end) {
  pollfd wait{listener.fd(), POLLIN, 0};
  return ::poll(&wait, 1, left_ms(end)) > 0 ? Socket(::accept(listener.fd(), nullptr, nullptr)) : Socket();
}

}  // namespace

Lifeline::Lifeline(Fabric& fabric, const ProcessRank& self, int ranks_per_node, std::chrono::milliseconds timeout)
    : rank_(self.rank), ranks_per_node_(ranks_per_node), size_(self.size) {
  const Socket listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in where{};
  where.sin_family = AF_INET, where.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t bytes = sizeof(where);
  WB_CHECK(::bind(listener.fd(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) == 0 && ::listen(listener.fd(), size_) == 0 &&
               ::getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&where), &bytes) == 0,
           "rank {} cannot listen: {}", rank_, std::strerror(errno));
  const std::uint64_t own = static_cast<std::uint64_t>(own_address(self)) << 16 | where.sin_port;  // both in network order
  std::vector<std::uint64_t> addresses(static_cast<std::size_t>(size_));
  fabric.all_gather(&own, addresses.data(), sizeof(own), "lifelines");
  connect(addresses, timeout, listener);
  fabric.barrier("lifelines");
}

// To lower ranks; higher ones come.
void Lifeline::connect(const std::vector<std::uint64_t>& addresses, std::chrono::milliseconds timeout, const Socket& listener) {
  const auto end = SocketClock::now() + timeout;
  const auto is_neighbour = [&](int r) {
    return r != rank_ && (r / ranks_per_node_ == rank_ / ranks_per_node_ || r % ranks_per_node_ == rank_ % ranks_per_node_);
  };
  int higher = 0;
  for (int r = 0; r < size_; ++r) {
    if (!is_neighbour(r)) continue;
    if (r > rank_) {
      ++higher;
      continue;
    }
    Socket socket = connect_to(addresses[static_cast<std::size_t>(r)], end);
    const std::int32_t own = rank_;
    if (socket.fd() < 0 || !send_all(socket.fd(), &own, sizeof(own), end)) {
      WB_FAIL(ErrorCode::kTimeout, "rank {} of {} could not connect to rank {} within {} ms", rank_, size_, r, timeout.count());
    }
    peers_.push_back(Peer{r, std::move(socket), {}, 0, false, false, 0});
  }
  while (higher > 0) {
    Socket socket = accept_from(listener, end);
    if (socket.fd() < 0) WB_FAIL(ErrorCode::kTimeout, "rank {} of {}: {} higher ranks did not connect within {} ms", rank_, size_, higher, timeout.count());
    std::int32_t r = -1;
    const bool said = receive_all(socket.fd(), &r, sizeof(r), std::min(end, SocketClock::now() + std::chrono::seconds(2)));
    const bool is_new = std::none_of(peers_.begin(), peers_.end(), [&](const Peer& peer) { return peer.rank == r; });
    if (!said || r <= rank_ || r >= size_ || !is_neighbour(r) || !is_new) continue;  // no rank of this group
    peers_.push_back(Peer{r, std::move(socket), {}, 0, false, false, 0});
    --higher;
  }
  for (const Peer& peer : peers_) keep_alive(peer.socket.fd());
}

Lifeline::~Lifeline() {
  for (Peer& peer : peers_) {
    if (lost_ < 0) send(peer, Message{kLeaves, rank_, 0, 0});
  }
}

void Lifeline::send(Peer& peer, Message message) noexcept {
  if (!peer.has_left) (void)::send(peer.socket.fd(), &message, sizeof(message), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// What has come from one peer. False: it is lost, or says that another is.
bool Lifeline::read(Peer& peer) {
  while (!peer.has_left) {
    const ssize_t got = ::recv(peer.socket.fd(), reinterpret_cast<char*>(&peer.message) + peer.have, sizeof(Message) - peer.have, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return true;
    if (got <= 0) return lose(peer.rank, Loss::kEnded);
    peer.have += static_cast<std::size_t>(got);
    if (peer.have < sizeof(Message)) continue;
    peer.have = 0;
    switch (peer.message.kind) {
      case kLeaves:
        peer.has_left = true;
        break;
      case kIsLost:
        return lose(peer.message.rank, static_cast<Loss>(peer.message.why));
      case kAsks:
        send(peer, Message{kAnswers, static_cast<std::int32_t>(progress_), 0, 0});
        break;
      default:
        peer.has_answered = true, peer.progress = static_cast<std::uint32_t>(peer.message.rank);
    }
  }
  return true;
}

bool Lifeline::lose(int rank, Loss why) {
  lost_ = rank, loss_ = why;
  return false;
}

int Lifeline::look() {
  for (Peer& peer : peers_) {
    if (lost_ < 0) (void)read(peer);
  }
  return lost_;
}

int Lifeline::lost() {
  const std::lock_guard lock(mutex_);
  return look();
}

Loss Lifeline::loss() const {
  const std::lock_guard lock(mutex_);
  return loss_;
}

void Lifeline::tell(int rank, Loss why) noexcept {
  const std::lock_guard lock(mutex_);
  if (std::exchange(has_told_, true)) return;
  (void)lose(rank, why);
  for (Peer& peer : peers_) send(peer, Message{kIsLost, rank, static_cast<std::int32_t>(why), 0});
}

void Lifeline::report(std::uint32_t progress) {
  const std::lock_guard lock(mutex_);
  progress_ = progress;
}

Lifeline::Answers Lifeline::ask(std::chrono::milliseconds patience) {
  {
    const std::lock_guard lock(mutex_);
    for (Peer& peer : peers_) peer.has_answered = false, send(peer, Message{kAsks, rank_, 0, 0});
  }
  const auto start = SocketClock::now();
  Answers answers;
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (look() >= 0) return Answers{};
      const auto behind = [&](const Peer& peer) { return static_cast<std::int32_t>(progress_ - peer.progress); };
      std::vector<const Peer*> late;
      answers = {};
      for (const Peer& peer : peers_) {
        const bool answers_now = !peer.has_left && peer.has_answered;
        if (!answers_now) answers.silent.push_back(peer.rank);
        if (answers_now && behind(peer) > 0) late.push_back(&peer);
      }
      std::stable_sort(late.begin(), late.end(), [&](const Peer* a, const Peer* b) { return behind(*a) > behind(*b); });
      for (const Peer* peer : late) answers.late.push_back(peer->rank);
    }
    const bool has_all = answers.silent.empty();
    if (has_all && !answers.late.empty()) return answers;
    if (left_ms(start + (has_all ? 2 : 1) * patience) == 0) return answers;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace waybill::cuda
