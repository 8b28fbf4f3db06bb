// SPDX-License-Identifier: Apache-2.0
// Two nodes of two ranks as processes, with lifelines between them. Needs no GPU.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "fabric/child_processes.h"
#include "fabric/nccl/nccl_lifeline.h"
#include "waybill/error.h"

namespace waybill::cuda {

inline constexpr int kRanks = 4, kPerNode = 2;  // neighbours of a rank: the other of its node, and its number on the other node; not the third
inline constexpr std::chrono::milliseconds kLong(20000);

// A pair of sockets for each two ranks.
using Mesh = std::array<std::array<int, kRanks>, kRanks>;

class MeshTransport final : public FabricTransport {
 public:
  MeshTransport(const Mesh& mesh, int rank) : mesh_(mesh), rank_(static_cast<std::size_t>(rank)) {}
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive, std::span<const std::int64_t> receive_bytes) override {
    const auto end = SocketClock::now() + kLong;
    const auto* from = static_cast<const char*>(send);
    for (std::size_t p = 0; p < kRanks; ++p) {  // small: what is not read yet has room in the sockets
      if (p != rank_) WB_CHECK(send_all(mesh_[rank_][p], from, static_cast<std::size_t>(send_bytes[p]), end), "rank {} is gone", p);
      from += send_bytes[p];
    }
    auto* to = static_cast<char*>(receive);
    for (std::size_t p = 0; p < kRanks; ++p) {
      if (p != rank_) WB_CHECK(receive_all(mesh_[rank_][p], to, static_cast<std::size_t>(receive_bytes[p]), end), "rank {} is gone", p);
      to += receive_bytes[p];
    }
  }

 private:
  const Mesh& mesh_;
  std::size_t rank_;
};

// Exit code of each rank: body() in a process of its own, once all lifelines are there.
inline std::vector<int> run_lifelines(const std::function<int(int rank, std::unique_ptr<Lifeline> line)>& body) {
  Mesh mesh{};
  for (std::size_t a = 0; a < kRanks; ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      int pair[2] = {};
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
      mesh[a][b] = pair[0], mesh[b][a] = pair[1];
    }
  }
  const auto own = [&](int rank) {
    const auto fabric = make_caller_fabric(std::make_unique<MeshTransport>(mesh, rank), kRanks, rank, {});
    return body(rank, std::make_unique<Lifeline>(*fabric, ProcessRank{rank, kRanks, 0, "127.0.0.1", 1}, kPerNode, kLong));
  };
  return test_support::fork_ranks(kRanks, own, [&] {
    for (const auto& row : mesh) {
      for (const int fd : row) {
        if (fd > 0) ::close(fd);
      }
    }
  });
}

inline int wait_for_loss(Lifeline& line) {
  const auto end = SocketClock::now() + kLong;
  while (line.lost() < 0 && left_ms(end) > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return line.lost();
}

}  // namespace waybill::cuda
