// SPDX-License-Identifier: Apache-2.0
#include "process_mesh.h"

#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

namespace waybill::jax {
namespace {

constexpr std::uint32_t kLetter = 1, kAbort = 2;
constexpr std::size_t kSecretBytes = 64;

struct Hello {
  std::uint64_t magic = 0x5742'6a61'782d'0001ull;  // the last part is the version of this protocol
  std::uint32_t process = 0, reserved = 0;
  char secret[kSecretBytes] = {};
};

struct Frame {
  std::uint32_t kind = kLetter, round = 0, source = 0, target = 0;
  std::uint64_t channel = 0, bytes = 0;
};

std::string system_text() { return std::strerror(errno); }

bool read_all(int socket, void* data, std::size_t bytes) {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(socket, to, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool write_all(int socket, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::send(socket, from, bytes, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    from += put;
    bytes -= static_cast<std::size_t>(put);
  }
  return true;
}

struct Addresses {
  addrinfo* list = nullptr;
  ~Addresses() {
    if (list != nullptr) ::freeaddrinfo(list);
  }
};

ProcessMesh::Failure look_up(const std::string& host, int port, Addresses& found) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found.list);
  if (code != 0) return "address '" + host + "': " + ::gai_strerror(code);
  return std::nullopt;
}

std::string at(const std::string& host, int port) { return host + ":" + std::to_string(port); }

}  // namespace

ProcessMesh& ProcessMesh::instance() {
  static ProcessMesh* const mesh = new ProcessMesh;  // never destroyed: its threads and XLA's may outlive static destructors
  return *mesh;
}

ProcessMesh::Failure ProcessMesh::listen(const std::string& host, const std::string& secret, int& port) {
  Addresses found;
  if (Failure failure = look_up(host, 0, found)) return failure;
  const int listener = ::socket(found.list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  if (listener < 0 || ::bind(listener, found.list->ai_addr, found.list->ai_addrlen) != 0 || ::listen(listener, 1024) != 0 ||
      ::getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    const std::string text = "cannot listen on " + host + ": " + system_text();
    if (listener >= 0) ::close(listener);
    return text;
  }
  port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  secret_ = secret.substr(0, kSecretBytes);
  std::thread([this, listener] { accept_connections(listener); }).detach();
  return std::nullopt;
}

void ProcessMesh::set_peer(std::uint32_t index, const std::string& host, int port) {
  while (peers_.size() <= index) peers_.push_back(std::make_unique<Peer>());
  peers_[index]->host = host;
  peers_[index]->port = port;
}

void ProcessMesh::start(std::uint32_t my_index, std::chrono::milliseconds timeout) {
  my_index_ = my_index;
  timeout_ = timeout;
}

void ProcessMesh::accept_connections(int listener) {
  for (;;) {
    const int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket >= 0) std::thread([this, socket] { read_connection(socket); }).detach();
    if (socket < 0 && errno != EINTR && errno != ECONNABORTED) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // out of descriptors
  }
}

void ProcessMesh::read_connection(int socket) {
  Hello hello;
  const Hello ours;
  if (!read_all(socket, &hello, sizeof(hello)) || hello.magic != ours.magic || std::strncmp(hello.secret, secret_.c_str(), kSecretBytes) != 0) {
    ::close(socket);  // not one of us
    return;
  }
  std::string reason = "it has closed its connection";
  try {
    Frame frame;
    while (read_all(socket, &frame, sizeof(frame))) {
      std::vector<std::byte> data(frame.bytes);
      if (!read_all(socket, data.data(), data.size())) break;
      if (frame.kind == kAbort) {
        fail_channel(frame.channel, std::string(reinterpret_cast<const char*>(data.data()), data.size()));
      } else {
        deliver({frame.channel, frame.round, frame.source, frame.target}, std::move(data));
      }
    }
  } catch (const std::exception& error) {  // no memory for a message
    reason = error.what();
  }
  ::close(socket);
  const std::lock_guard lock(mutex_);
  gone_.emplace(hello.process, reason);
  arrived_.notify_all();
}

void ProcessMesh::deliver(const Letter& letter, std::vector<std::byte> data) {
  const std::lock_guard lock(mutex_);
  if (failed_channels_.count(letter.channel) != 0) return;
  mail_[letter].push_back(std::move(data));
  arrived_.notify_all();
}

void ProcessMesh::fail_channel(std::uint64_t channel, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  failed_channels_.emplace(channel, reason);
  const auto end = mail_.upper_bound({channel, UINT32_MAX, UINT32_MAX, UINT32_MAX});
  mail_.erase(mail_.lower_bound({channel, 0, 0, 0}), end);
  arrived_.notify_all();
}

ProcessMesh::Failure ProcessMesh::connect_to(Peer& peer, std::uint32_t process) const {
  const std::string name = "process " + std::to_string(process) + " at " + at(peer.host, peer.port);
  Addresses found;
  if (Failure failure = look_up(peer.host, peer.port, found)) return name + ": " + *failure;
  const int socket = ::socket(found.list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return name + ": " + system_text();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout_);
  const timeval limit{std::max<std::int64_t>(1, seconds.count()), 0};
  const int on = 1;
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));  // limits connect, too
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  Hello hello;
  hello.process = my_index_;
  std::memcpy(hello.secret, secret_.data(), secret_.size());
  if (::connect(socket, found.list->ai_addr, found.list->ai_addrlen) != 0 || !write_all(socket, &hello, sizeof(hello))) {
    const std::string text = name + " cannot be reached: " + system_text();
    ::close(socket);
    return text;
  }
  peer.socket = socket;
  return std::nullopt;
}

ProcessMesh::Failure ProcessMesh::write(std::uint32_t process, std::uint32_t kind, const Letter& letter, const void* data, std::size_t bytes) {
  if (process >= peers_.size() || peers_[process]->port == 0) return "process " + std::to_string(process) + " is not known; waybill.jax was not set up in it";
  Peer& peer = *peers_[process];
  const std::lock_guard lock(peer.writing);
  if (peer.socket < 0) {
    if (Failure failure = connect_to(peer, process)) return failure;
  }
  const Frame frame{kind, letter.round, letter.source, letter.target, letter.channel, bytes};
  if (write_all(peer.socket, &frame, sizeof(frame)) && write_all(peer.socket, data, bytes)) return std::nullopt;
  return "process " + std::to_string(process) + " at " + at(peer.host, peer.port) + " takes no data: " + system_text();
}

ProcessMesh::Failure ProcessMesh::send(std::uint32_t process, const Letter& letter, const void* data, std::size_t bytes) {
  if (process != my_index_) return write(process, kLetter, letter, data, bytes);
  const auto* from = static_cast<const std::byte*>(data);
  deliver(letter, std::vector<std::byte>(from, from + bytes));
  return std::nullopt;
}

ProcessMesh::Failure ProcessMesh::receive(std::uint32_t from, const Letter& letter, std::vector<std::byte>& data) {
  const auto end = std::chrono::steady_clock::now() + timeout_;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (const auto failed = failed_channels_.find(letter.channel); failed != failed_channels_.end()) return failed->second;
    if (const auto found = mail_.find(letter); found != mail_.end()) {
      data = std::move(found->second.front());
      found->second.erase(found->second.begin());
      if (found->second.empty()) mail_.erase(found);
      return std::nullopt;
    }
    const std::string who = "rank " + std::to_string(letter.target) + " waits for rank " + std::to_string(letter.source) + " (process " + std::to_string(from) +
                            ", message " + std::to_string(letter.round) + "): ";
    if (const auto gone = gone_.find(from); gone != gone_.end()) return who + gone->second;
    if (arrived_.wait_until(lock, end) == std::cv_status::timeout && mail_.find(letter) == mail_.end()) {
      return who + "nothing has come within " + std::to_string(timeout_.count()) + " ms";
    }
  }
}

void ProcessMesh::abort(std::uint64_t channel, const std::vector<std::uint32_t>& processes, const std::string& reason) {
  fail_channel(channel, reason);
  for (const std::uint32_t process : processes) {
    if (process != my_index_) (void)write(process, kAbort, {channel, 0, 0, 0}, reason.data(), reason.size());  // who is gone needs no telling
  }
}

}  // namespace waybill::jax

// For Python (ctypes): 0, or -1 with the text in `error`.
extern "C" __attribute__((visibility("default"))) int wbx_mesh_listen(const char* host, const char* secret, int* port, char* error, int error_bytes) {
  const auto failure = waybill::jax::ProcessMesh::instance().listen(host, secret, *port);
  if (!failure) return 0;
  std::strncpy(error, failure->c_str(), static_cast<std::size_t>(error_bytes) - 1);
  return -1;
}
extern "C" __attribute__((visibility("default"))) void wbx_mesh_set_peer(std::uint32_t index, const char* host, int port) {
  waybill::jax::ProcessMesh::instance().set_peer(index, host, port);
}
extern "C" __attribute__((visibility("default"))) void wbx_mesh_start(std::uint32_t my_index, std::int64_t timeout_ms) {
  waybill::jax::ProcessMesh::instance().start(my_index, std::chrono::milliseconds(timeout_ms));
}
