// SPDX-License-Identifier: Apache-2.0
// Bytes between the processes of one JAX program, over TCP. Each process listens; a connection is opened by the first message and carries one
// direction. A thread a connection reads messages into mailboxes, so that no sender waits for its receiver and calls may come in any order.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace waybill::jax {

// Who a message is from and for. A channel belongs to one group of ranks; rounds count its messages.
struct Letter {
  std::uint64_t channel = 0;
  std::uint32_t round = 0, source = 0, target = 0;
  auto operator<=>(const Letter&) const = default;
};

class ProcessMesh {
 public:
  using Failure = std::optional<std::string>;  // the text, or nothing went wrong

  static ProcessMesh& instance();

  // Listens on `host` (a numeric address of this machine) and returns the port. Connections must begin with `secret`.
  Failure listen(const std::string& host, const std::string& secret, int& port);
  // Where process `index` listens. Call it for all processes, then `start`.
  void set_peer(std::uint32_t index, const std::string& host, int port);
  void start(std::uint32_t my_index, std::chrono::milliseconds timeout);
  std::uint32_t my_index() const { return my_index_; }

  // Returns when the bytes are handed to the system (or to the mailbox, for a rank of this process).
  Failure send(std::uint32_t process, const Letter& letter, const void* data, std::size_t bytes);
  // Waits for the letter; ends early when its channel was aborted or process `from` is gone.
  Failure receive(std::uint32_t from, const Letter& letter, std::vector<std::byte>& data);
  // Ends all waits on the channel, here and in the given processes, with `reason`.
  void abort(std::uint64_t channel, const std::vector<std::uint32_t>& processes, const std::string& reason);

 private:
  struct Peer {
    std::string host;
    int port = 0;
    std::mutex writing;
    int socket = -1;  // opened by the first message to it
  };
  void accept_connections(int listener);
  void read_connection(int socket);
  void deliver(const Letter& letter, std::vector<std::byte> data);
  void fail_channel(std::uint64_t channel, const std::string& reason);
  Failure connect_to(Peer& peer, std::uint32_t process) const;
  Failure write(std::uint32_t process, std::uint32_t kind, const Letter& letter, const void* data, std::size_t bytes);

  std::string secret_;
  std::uint32_t my_index_ = 0;
  std::chrono::milliseconds timeout_{60000};
  std::vector<std::unique_ptr<Peer>> peers_;

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<Letter, std::vector<std::vector<std::byte>>> mail_;
  std::unordered_map<std::uint64_t, std::string> failed_channels_;
  std::unordered_map<std::uint32_t, std::string> gone_;  // processes whose connection has ended
};

}  // namespace waybill::jax
