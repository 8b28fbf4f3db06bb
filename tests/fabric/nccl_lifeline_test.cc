// SPDX-License-Identifier: Apache-2.0
// Which rank is gone: real processes that end, sleep or leave, two nodes of two ranks. Needs no GPU.
#include "fabric/nccl/nccl_lifeline.h"

#include <gmock/gmock.h>
#include <sys/wait.h>

#include <array>
#include <functional>
#include <memory>
#include <thread>

#include "waybill/error.h"

namespace waybill::cuda {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;

constexpr int kRanks = 4, kPerNode = 2;  // neighbours of a rank: the other of its node, and its number on the other node; not the third
constexpr milliseconds kLong(20000);

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
std::vector<int> run(const std::function<int(int rank, std::unique_ptr<Lifeline> line)>& body) {
  Mesh mesh{};
  for (std::size_t a = 0; a < kRanks; ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      int pair[2] = {};
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
      mesh[a][b] = pair[0], mesh[b][a] = pair[1];
    }
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < kRanks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 100;
      try {
        const auto fabric = make_caller_fabric(std::make_unique<MeshTransport>(mesh, rank), kRanks, rank, {});
        code = body(rank, std::make_unique<Lifeline>(*fabric, ProcessRank{rank, kRanks, 0, "127.0.0.1", 1}, kPerNode, kLong));
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  for (const auto& row : mesh) {
    for (const int fd : row) {
      if (fd > 0) ::close(fd);
    }
  }
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return codes;
}

int wait_for_loss(Lifeline& line) {
  const auto end = SocketClock::now() + kLong;
  while (line.lost() < 0 && left_ms(end) > 0) std::this_thread::sleep_for(milliseconds(1));
  return line.lost();
}

TEST(NcclLifeline, AnEndedProcessIsNamedByRanksThatHaveNoConnectionToIt) {
  const auto body = [](int rank, std::unique_ptr<Lifeline> line) {
    if (rank == 3) ::_exit(7);
    const int lost = wait_for_loss(*line);
    if (lost != 3 || !line->has_ended()) return 1;
    line->tell(lost, line->has_ended());
    if (rank != 0) std::this_thread::sleep_for(milliseconds(100));
    ::_exit(line->lost() == 3 ? 0 : 2);  // the first loss stands, though these processes end, too
  };
  EXPECT_THAT(run(body), ElementsAre(0, 0, 0, 7));
}

TEST(NcclLifeline, ASleepingProcessIsNamedAndNotTakenForAnEndedOne) {
  int gate[2] = {};
  ASSERT_EQ(::pipe(gate), 0);
  const auto body = [&](int rank, std::unique_ptr<Lifeline> line) {
    if (rank == 3) {  // sleeps until the others have done
      char byte = 0;
      for (int i = 0; i < kRanks - 1; ++i) (void)!::read(gate[0], &byte, 1);
      return wait_for_loss(*line) == 3 && !line->has_ended() ? 0 : 1;  // the others gave it up
    }
    const std::vector<int> silent = line->silent(milliseconds(rank == 0 ? 4000 : 1000));
    // A neighbour of the sleeping rank finds it, or is told by the other that has; rank 0 is no neighbour and is told.
    const bool is_told = line->lost() == 3 && !line->has_ended(), found = rank != 0 && silent == std::vector<int>{3};
    line->tell(3, false);
    std::this_thread::sleep_for(milliseconds(200));
    (void)!::write(gate[1], "!", 1);
    return found || is_told ? 0 : 2;
  };
  EXPECT_THAT(run(body), ElementsAre(0, 0, 0, 0));
  ::close(gate[0]), ::close(gate[1]);
}

TEST(NcclLifeline, ARankThatLeavesInOrderIsNotLostButDoesNotAnswer) {
  const auto body = [](int rank, std::unique_ptr<Lifeline> line) {
    if (rank == 3) return 0;  // its lifeline says so
    const std::vector<int> silent = line->silent(milliseconds(1500));
    const bool is_lost = line->lost() >= 0;
    std::this_thread::sleep_for(milliseconds(rank == 0 ? 500 : 3000));  // nobody leaves while another asks
    if (is_lost) return 1;
    return silent == (rank == 0 ? std::vector<int>{} : std::vector<int>{3}) ? 0 : 2;
  };
  EXPECT_THAT(run(body), ElementsAre(0, 0, 0, 0));
}

TEST(NcclLifeline, NeighboursThatWaitThemselvesAnswer) {
  const auto body = [](int, std::unique_ptr<Lifeline> line) {
    const std::vector<int> silent = line->silent(milliseconds(1000));
    const bool is_lost = line->lost() >= 0;
    std::this_thread::sleep_for(milliseconds(1000));
    return silent.empty() && !is_lost ? 0 : 1;
  };
  EXPECT_THAT(run(body), ElementsAre(0, 0, 0, 0));
}

}  // namespace
}  // namespace waybill::cuda
