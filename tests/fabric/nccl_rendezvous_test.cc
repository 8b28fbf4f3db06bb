// SPDX-License-Identifier: Apache-2.0
// How processes find each other before NCCL can talk. Needs no GPU.
#include "fabric/nccl/nccl_rendezvous.h"

#include <gmock/gmock.h>
#include <netinet/in.h>

#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/nccl/nccl_socket.h"
#include "waybill/error.h"

namespace waybill::cuda {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

int free_port() {
  const Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in where{};
  where.sin_family = AF_INET, where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(where);
  EXPECT_EQ(::bind(socket.fd(), reinterpret_cast<const sockaddr*>(&where), bytes), 0);
  EXPECT_EQ(::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&where), &bytes), 0);
  return ntohs(where.sin_port);
}

struct Outcome {
  char data[8] = {};
  ErrorCode code = ErrorCode::kInternal;
  std::string text;  // empty: no error
};

// One thread a process of the group.
std::vector<Outcome> run(const std::vector<ProcessRank>& processes, milliseconds timeout) {
  std::vector<Outcome> outcomes(processes.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < processes.size(); ++i) {
    threads.emplace_back([&, i] {
      Outcome& mine = outcomes[i];
      if (processes[i].rank == 0) std::strcpy(mine.data, "secret");
      try {
        hand_out(processes[i], mine.data, sizeof(mine.data), timeout);
      } catch (const Error& error) {
        mine.code = error.code(), mine.text = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

std::vector<ProcessRank> ranks(std::initializer_list<int> which, int size, int port) {
  std::vector<ProcessRank> processes;
  for (const int rank : which) processes.push_back(ProcessRank{rank, size, 0, "127.0.0.1", port});
  return processes;
}

// The variables of one launcher, and none of another's, while it lives.
class Launcher {
 public:
  explicit Launcher(const std::vector<std::pair<const char*, const char*>>& variables) {
    for (const char* name : kNames) ::unsetenv(name);
    for (const auto& [name, value] : variables) ::setenv(name, value, 1);
  }
  ~Launcher() {
    for (const char* name : kNames) ::unsetenv(name);
  }

 private:
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "SLURM_PROCID",
                                           "SLURM_NTASKS",
                                           "OMPI_COMM_WORLD_RANK",
                                           "SLURM_LOCALID",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "SLURM_LAUNCH_NODE_IPADDR",
                                           "WAYBILL_NCCL_ADDRESS",
                                           "WAYBILL_NCCL_PORT"};
};

TEST(NcclRendezvous, RanksComeFromTorchrunMpirunAndSrun) {
  struct Case {
    std::vector<std::pair<const char*, const char*>> variables;
    ProcessRank want;
  };
  const Case cases[] = {
      {{}, {0, 1, 0, "127.0.0.1", 29531}},
      {{{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "10.0.0.7"}, {"MASTER_PORT", "29500"}}, {5, 8, 1, "10.0.0.7", 29501}},
      {{{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "3"}}, {3, 4, 3, "127.0.0.1", 29531}},
      {{{"SLURM_PROCID", "9"}, {"SLURM_NTASKS", "16"}, {"SLURM_LOCALID", "1"}, {"SLURM_LAUNCH_NODE_IPADDR", "10.1.1.1"}}, {9, 16, 1, "10.1.1.1", 29531}},
      {{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"WAYBILL_NCCL_ADDRESS", "b"}, {"WAYBILL_NCCL_PORT", "7000"}}, {1, 2, 1, "b", 7000}},
  };
  for (const Case& c : cases) {
    const Launcher launcher(c.variables);
    const ProcessRank got = process_rank();
    EXPECT_EQ(got.rank, c.want.rank);
    EXPECT_EQ(got.size, c.want.size);
    EXPECT_EQ(got.local_rank, c.want.local_rank);
    EXPECT_EQ(got.address, c.want.address);
    EXPECT_EQ(got.port, c.want.port);
  }
  const Launcher no_number({{"RANK", "two"}, {"WORLD_SIZE", "4"}});
  EXPECT_THROW((void)process_rank(), Error);
  const Launcher outside({{"RANK", "4"}, {"WORLD_SIZE", "4"}});
  EXPECT_THROW((void)process_rank(), Error);
}

TEST(NcclRendezvous, EveryRankGetsTheData) {
  for (const Outcome& outcome : run(ranks({2, 0, 1, 3}, 4, free_port()), milliseconds(20000))) {
    EXPECT_EQ(outcome.text, "");
    EXPECT_STREQ(outcome.data, "secret");
  }
}

TEST(NcclRendezvous, RanksThatNeverStartAreNamedByAllOthers) {
  for (const Outcome& outcome : run(ranks({0, 1, 4}, 5, free_port()), milliseconds(500))) {
    EXPECT_EQ(outcome.code, ErrorCode::kTimeout);
    EXPECT_THAT(outcome.text, HasSubstr("for 4 ranks; 2 did not come: 2, 3"));
  }
  const Outcome alone = run(ranks({1}, 2, free_port()), milliseconds(100))[0];
  EXPECT_EQ(alone.code, ErrorCode::kTimeout);
  EXPECT_THAT(alone.text, HasSubstr("rank 1 found no rank 0 at 127.0.0.1:"));
}

TEST(NcclRendezvous, TwoProcessesOfOneRankAreRefusedOnEveryRank) {
  const std::vector<Outcome> outcomes = run(ranks({0, 1, 1}, 3, free_port()), milliseconds(20000));
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(outcome.text, HasSubstr("two processes say that they are rank 1 of 3"));
  }
}

TEST(NcclRendezvous, ARankOfAnotherGroupSizeIsRefusedOnBoth) {
  const int port = free_port();
  std::vector<ProcessRank> processes = ranks({0}, 2, port);
  processes.push_back(ranks({1}, 4, port)[0]);
  for (const Outcome& outcome : run(processes, milliseconds(20000))) {
    EXPECT_EQ(outcome.code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(outcome.text, HasSubstr("rank 1 was started for a group of 4, rank 0 for one of 2"));
  }
}

// A connection of something else, which says nothing or anything.
TEST(NcclRendezvous, StrangersTakeNoRanksPlace) {
  const int port = free_port();
  std::vector<Outcome> outcomes;
  std::thread first([&] { outcomes = run(ranks({0}, 2, port), milliseconds(20000)); });
  std::vector<Socket> strangers;
  for (const char* says : {"", "GET / HTTP/1.1\r\n\r\n"}) {
    sockaddr_in where{};
    where.sin_family = AF_INET, where.sin_addr.s_addr = htonl(INADDR_LOOPBACK), where.sin_port = htons(static_cast<std::uint16_t>(port));
    Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
    for (int i = 0; i < 1000 && ::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) != 0; ++i) {
      std::this_thread::sleep_for(milliseconds(5));
      socket = Socket(::socket(AF_INET, SOCK_STREAM, 0));
    }
    (void)::send(socket.fd(), says, std::strlen(says), MSG_NOSIGNAL);
    strangers.push_back(std::move(socket));
  }
  const Outcome second = run(ranks({1}, 2, port), milliseconds(20000))[0];
  first.join();
  EXPECT_EQ(outcomes[0].text, "");
  EXPECT_EQ(second.text, "");
  EXPECT_STREQ(second.data, "secret");
}

}  // namespace
}  // namespace waybill::cuda
