// SPDX-License-Identifier: Apache-2.0
// TCP between the processes of a group, with deadlines: what rendezvous and lifelines share. IPv4.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

namespace waybill::cuda {

using SocketClock = std::chrono::steady_clock;

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

inline int left_ms(SocketClock::time_point end) {
  return static_cast<int>(std::max<std::int64_t>(0, std::chrono::duration_cast<std::chrono::milliseconds>(end - SocketClock::now()).count()));
}

// All of `bytes`, or false.
template <class Step>
bool move_all(int fd, std::size_t bytes, short event, SocketClock::time_point end, const Step& step) {
  for (std::size_t done = 0; done < bytes;) {
    pollfd wait{fd, event, 0};
    if (::poll(&wait, 1, left_ms(end)) <= 0) return false;
    const ssize_t moved = step(done);
    if (moved <= 0) return false;
    done += static_cast<std::size_t>(moved);
  }
  return true;
}
inline bool send_all(int fd, const void* data, std::size_t bytes, SocketClock::time_point end) {
  const auto* from = static_cast<const char*>(data);
  return move_all(fd, bytes, POLLOUT, end, [&](std::size_t done) { return ::send(fd, from + done, bytes - done, MSG_NOSIGNAL); });
}
inline bool receive_all(int fd, void* data, std::size_t bytes, SocketClock::time_point end) {
  auto* to = static_cast<char*>(data);
  return move_all(fd, bytes, POLLIN, end, [&](std::size_t done) { return ::recv(fd, to + done, bytes - done, 0); });
}

}  // namespace waybill::cuda
