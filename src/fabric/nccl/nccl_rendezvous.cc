// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_rendezvous.h"

#include <netdb.h>
#include <netinet/in.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "fabric/nccl/nccl_socket.h"
#include "waybill/error.h"

namespace waybill::cuda {
namespace {

using Clock = SocketClock;

// Value of the first variable that is set; `otherwise` where none is.
int number_of(std::initializer_list<const char*> names, int otherwise) {
  for (const char* name : names) {
    const char* text = std::getenv(name);
    if (text == nullptr) continue;
    int value = 0;
    const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
    WB_CHECK(error == std::errc() && *end == '\0', "{} must be a number, got \"{}\"", name, text);
    return value;
  }
  return otherwise;
}

void serve(const ProcessRank& self, const void* data, std::size_t bytes, Clock::time_point end) {
  const Socket listener(::socket(AF_INET, SOCK_STREAM, 0));
  const int on = 1;
  sockaddr_in where{};
  where.sin_family = AF_INET, where.sin_addr.s_addr = htonl(INADDR_ANY), where.sin_port = htons(static_cast<std::uint16_t>(self.port));
  (void)::setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  WB_CHECK(::bind(listener.fd(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) == 0 && ::listen(listener.fd(), self.size) == 0,
           "rank 0 cannot listen on port {}: {}; WAYBILL_NCCL_PORT chooses another", self.port, std::strerror(errno));
  for (int served = 0; served < self.size - 1;) {
    pollfd wait{listener.fd(), POLLIN, 0};
    if (::poll(&wait, 1, left_ms(end)) <= 0) {
      WB_FAIL(ErrorCode::kTimeout, "rank 0 waited on port {} for {} ranks, {} came", self.port, self.size - 1, served);
    }
    const Socket peer(::accept(listener.fd(), nullptr, nullptr));
    if (peer.fd() < 0) continue;
    if (send_all(peer.fd(), data, bytes, end)) ++served;
  }
}

bool fetch(const ProcessRank& self, void* data, std::size_t bytes, Clock::time_point end) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_INET, hints.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(self.address.c_str(), std::to_string(self.port).c_str(), &hints, &found) != 0) return false;
  const Socket peer(::socket(AF_INET, SOCK_STREAM, 0));
  const bool connected = ::connect(peer.fd(), found->ai_addr, found->ai_addrlen) == 0;
  ::freeaddrinfo(found);
  return connected && receive_all(peer.fd(), data, bytes, end);
}

}  // namespace

ProcessRank process_rank() {
  ProcessRank self;
  self.rank = number_of({"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}, 0);
  self.size = number_of({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"}, 1);
  self.local_rank = number_of({"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"}, self.rank);
  for (const char* name : {"WAYBILL_NCCL_ADDRESS", "MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR"}) {
    if (const char* text = std::getenv(name); text != nullptr) {
      self.address = text;
      break;
    }
  }
  self.port = number_of({"WAYBILL_NCCL_PORT"}, number_of({"MASTER_PORT"}, 29530) + 1);
  WB_CHECK(self.size >= 1 && self.rank >= 0 && self.rank < self.size, "rank {} of {} processes is none", self.rank, self.size);
  return self;
}

void hand_out(const ProcessRank& self, void* data, std::size_t bytes, std::chrono::milliseconds timeout) {
  const Clock::time_point end = Clock::now() + timeout;
  if (self.size == 1) return;
  if (self.rank == 0) return serve(self, data, bytes, end);
  while (!fetch(self, data, bytes, end)) {  // rank 0 may not listen yet
    if (left_ms(end) == 0) WB_FAIL(ErrorCode::kTimeout, "rank {} found no rank 0 at {}:{}", self.rank, self.address, self.port);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace waybill::cuda
