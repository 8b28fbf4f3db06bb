// SPDX-License-Identifier: Apache-2.0
#include "fabric/nccl/nccl_rendezvous.h"

#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

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

// What a rank says first, and what it is told before the data.
struct Hello {
  static constexpr std::uint32_t kMagic = 0x57424e31;
  std::uint32_t magic = kMagic;
  std::int32_t rank = 0, size = 0;
};
struct Verdict {
  std::int32_t code = -1;  // of the error; -1: the data follows
  char text[252] = {};
};

// A client that connects and says nothing must not use up the time of the others.
Clock::time_point soon(Clock::time_point end) { return std::min(end, Clock::now() + std::chrono::seconds(2)); }

// Which ranks have come, all of them where the verdict says so.
Verdict gather(const ProcessRank& self, int listener, Clock::time_point end, std::vector<Socket>& came) {
  const auto fail = [](ErrorCode code, const std::string& text) {
    Verdict verdict{static_cast<std::int32_t>(code), {}};
    std::memcpy(verdict.text, text.data(), std::min(text.size(), sizeof(verdict.text) - 1));
    return verdict;
  };
  std::vector<bool> is_here(static_cast<std::size_t>(self.size));
  is_here[0] = true;
  for (int count = 1; count < self.size;) {
    pollfd wait{listener, POLLIN, 0};
    if (::poll(&wait, 1, left_ms(end)) <= 0) {
      std::string missing;
      for (std::size_t r = 0, named = 0; r < is_here.size() && named < 9; ++r) {
        if (!is_here[r]) missing += named++ == 0 ? std::to_string(r) : (named == 9 ? ", ..." : ", " + std::to_string(r));
      }
      return fail(ErrorCode::kTimeout,
                  fmt::format("rank 0 waited on port {} for {} ranks; {} did not come: {}", self.port, self.size - 1, self.size - count, missing));
    }
    Socket peer(::accept(listener, nullptr, nullptr));
    Hello hello;
    if (peer.fd() < 0 || !receive_all(peer.fd(), &hello, sizeof(hello), soon(end)) || hello.magic != Hello::kMagic) continue;
    const bool fits = hello.size == self.size && hello.rank > 0 && hello.rank < self.size;
    came.push_back(std::move(peer));
    if (!fits)
      return fail(ErrorCode::kInvalidArgument, fmt::format("rank {} was started for a group of {}, rank 0 for one of {}", hello.rank, hello.size, self.size));
    const auto r = static_cast<std::size_t>(hello.rank);
    if (is_here[r]) return fail(ErrorCode::kInvalidArgument, fmt::format("two processes say that they are rank {} of {}", hello.rank, self.size));
    is_here[r] = true, ++count;
  }
  return Verdict{};
}

void serve(const ProcessRank& self, const void* data, std::size_t bytes, Clock::time_point end) {
  const Socket listener(::socket(AF_INET, SOCK_STREAM, 0));
  const int on = 1;
  sockaddr_in where{};
  where.sin_family = AF_INET, where.sin_addr.s_addr = htonl(INADDR_ANY), where.sin_port = htons(static_cast<std::uint16_t>(self.port));
  (void)::setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  WB_CHECK(::bind(listener.fd(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) == 0 && ::listen(listener.fd(), self.size) == 0,
           "rank 0 cannot listen on port {}: {}; WAYBILL_NCCL_PORT chooses another", self.port, std::strerror(errno));
  std::vector<Socket> came;
  const Verdict verdict = gather(self, listener.fd(), end, came);
  for (const Socket& peer : came) {
    if (send_all(peer.fd(), &verdict, sizeof(verdict), Clock::now() + std::chrono::seconds(2)) && verdict.code < 0)
      (void)send_all(peer.fd(), data, bytes, Clock::now() + std::chrono::seconds(2));
  }
  if (verdict.code >= 0) throw_error(static_cast<ErrorCode>(verdict.code), verdict.text);
}

// False: rank 0 is not there (yet). Rank 0 answers when all have come or its own time is over.
bool fetch(const ProcessRank& self, void* data, std::size_t bytes, Clock::time_point end) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_INET, hints.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(self.address.c_str(), std::to_string(self.port).c_str(), &hints, &found) != 0) return false;
  const Socket peer(::socket(AF_INET, SOCK_STREAM, 0));
  const bool connected = ::connect(peer.fd(), found->ai_addr, found->ai_addrlen) == 0;
  ::freeaddrinfo(found);
  Hello hello;
  hello.rank = self.rank, hello.size = self.size;
  Verdict verdict;
  if (!connected || !send_all(peer.fd(), &hello, sizeof(hello), end) || !receive_all(peer.fd(), &verdict, sizeof(verdict), end + std::chrono::seconds(2)))
    return false;
  if (verdict.code >= 0) throw_error(static_cast<ErrorCode>(verdict.code), fmt::format("rank {} of {}: {}", self.rank, self.size, verdict.text));
  return receive_all(peer.fd(), data, bytes, end + std::chrono::seconds(2));
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
    if (left_ms(end) == 0) WB_FAIL(ErrorCode::kTimeout, "rank {} found no rank 0 at {}:{} within {} ms", self.rank, self.address, self.port, timeout.count());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace waybill::cuda
