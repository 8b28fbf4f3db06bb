// SPDX-License-Identifier: Apache-2.0
// Ranks of one execution of one call meet, whatever the order in which they come to the calls of a program.
#include "jax/meeting.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "jax/process_mesh.h"

namespace waybill::jax {
namespace {

Invitation invite(std::uint64_t ticket, int rank, int P = 2) {
  Invitation invitation;
  invitation.key = "dispatch";
  invitation.rank = rank;
  invitation.P = P;
  for (int r = 0; r < P; ++r) invitation.tickets.push_back({0, ticket + static_cast<std::uint64_t>(r)});
  return invitation;
}

// One call: the sum of the ranks' values.
std::int64_t sum_of(const Invitation& invitation, std::int64_t value) {
  std::unique_ptr<Seat> seat;
  const ffi::Error error = Seat::take(invitation, seat);
  EXPECT_TRUE(error.success()) << error.message();
  EXPECT_EQ(wb_fabric_all_reduce_i64(seat->fabric(), &value, 1), WB_OK) << wb_last_error();
  return value;
}

// Rank 0 begins with the call that rank 1 begins last, each call on a thread of its own.
std::vector<std::int64_t> two_calls_in_opposite_order(std::uint64_t first_ticket, std::uint64_t second_ticket) {
  std::vector<std::int64_t> sums(4);
  std::unique_ptr<Seat> seats[4];
  const auto come = [&](int index, std::uint64_t ticket, int rank) { EXPECT_TRUE(Seat::take(invite(ticket, rank), seats[index]).success()); };
  come(0, first_ticket, 0);
  come(1, second_ticket, 1);
  come(2, second_ticket, 0);
  come(3, first_ticket, 1);
  const std::int64_t values[4] = {1, 20, 10, 2};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      sums[i] = values[i];
      EXPECT_EQ(wb_fabric_all_reduce_i64(seats[i]->fabric(), &sums[i], 1), WB_OK) << wb_last_error();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return sums;
}

TEST(Meeting, TwoCallsOfOneFunctionStayApartWhateverTheOrder) { EXPECT_EQ(two_calls_in_opposite_order(100, 200), (std::vector<std::int64_t>{3, 30, 30, 3})); }

TEST(Meeting, WithoutTicketsOfTheirOwnTheyWouldMix) {
  // What a key of the traced call alone does: rank 0's first call meets rank 1's second one.
  EXPECT_EQ(two_calls_in_opposite_order(300, 300), (std::vector<std::int64_t>{21, 21, 12, 12}));
}

TEST(Meeting, ATicketServesTheCallsOfALoopInOrder) {
  for (std::int64_t round = 0; round < 5; ++round) {
    std::int64_t other = 0;
    std::thread peer([&] { other = sum_of(invite(400, 1), 10 * round); });
    EXPECT_EQ(sum_of(invite(400, 0), round), 11 * round);
    peer.join();
    EXPECT_EQ(other, 11 * round);
  }
}

TEST(Meeting, AFailureWakesTheOthersWithItsTextAndTheGroupIsNotUsedAgain) {
  std::string text;
  std::thread peer([&] {
    std::unique_ptr<Seat> seat;
    EXPECT_TRUE(Seat::take(invite(500, 1), seat).success());
    std::int64_t value = 1;
    text = seat->done(wb_fabric_all_reduce_i64(seat->fabric(), &value, 1)).message();
  });
  {
    std::unique_ptr<Seat> seat;
    EXPECT_TRUE(Seat::take(invite(500, 0), seat).success());
    EXPECT_EQ(wb_route_validate(nullptr, 0), WB_INVALID_ARGUMENT);  // any failure of this rank
    EXPECT_TRUE(seat->done(WB_INVALID_ARGUMENT).failure());
  }
  peer.join();
  EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
  std::thread again([] { (void)sum_of(invite(600, 1), 1); });
  EXPECT_EQ(sum_of(invite(600, 0), 2), 3);
  again.join();
}

// Two processes, played by two meshes of this one. Never destroyed: their threads live as long as the program.
class Mesh : public ::testing::Test {
 protected:
  void SetUp() override {
    for (std::uint32_t index = 0; index < 2; ++index) {
      ProcessMesh& mine = index == 0 ? zero : one;
      int port = 0;
      ASSERT_FALSE(mine.listen("127.0.0.1", "secret", port));
      for (ProcessMesh* any : {&zero, &one}) any->set_peer(index, "127.0.0.1", port);
      mine.start(index, std::chrono::milliseconds(300));
    }
  }
  ProcessMesh& zero = *new ProcessMesh;
  ProcessMesh& one = *new ProcessMesh;
};

TEST_F(Mesh, LettersComeInAnyOrder) {
  const std::vector<std::byte> large(3 << 20, std::byte{7});
  ASSERT_FALSE(zero.send(1, {5, 1, 0, 1}, "second", 6));
  ASSERT_FALSE(zero.send(1, {9, 0, 0, 1}, large.data(), large.size()));
  ASSERT_FALSE(zero.send(1, {5, 0, 0, 1}, "first", 5));
  std::vector<std::byte> data;
  ASSERT_FALSE(one.receive(0, {5, 0, 0, 1}, data));
  EXPECT_EQ(data.size(), 5u);
  ASSERT_FALSE(one.receive(0, {9, 0, 0, 1}, data));
  EXPECT_EQ(data, large);
  ASSERT_FALSE(one.receive(0, {5, 1, 0, 1}, data));
  EXPECT_EQ(data.size(), 6u);
}

TEST_F(Mesh, WaitsEndWithATextThatNamesThePeer) {
  std::vector<std::byte> data;
  EXPECT_EQ(one.receive(0, {5, 3, 0, 1}, data), "rank 1 waits for rank 0 (process 0, message 3): nothing has come within 300 ms");
  zero.abort(5, {0, 1}, "rank 0 failed: out of apples");
  EXPECT_EQ(one.receive(0, {5, 3, 0, 1}, data), "rank 0 failed: out of apples");
  EXPECT_EQ(zero.receive(1, {5, 3, 1, 0}, data), "rank 0 failed: out of apples");
  EXPECT_EQ(zero.send(7, {5, 3, 0, 1}, "", 0), "process 7 is not known; waybill.jax was not set up in it");
}

TEST_F(Mesh, AProcessThatEndsIsNamedAtOnce) {
  int port = 0;
  ASSERT_FALSE(one.listen("127.0.0.1", "secret", port));
  one.start(1, std::chrono::milliseconds(60000));
  const pid_t child = ::fork();
  if (child == 0) {
    ProcessMesh& mesh = *new ProcessMesh;
    int unused = 0;
    (void)mesh.listen("127.0.0.1", "secret", unused);
    mesh.set_peer(1, "127.0.0.1", port);
    mesh.start(0, std::chrono::milliseconds(1000));
    (void)mesh.send(1, {5, 0, 0, 1}, "last words", 10);
    ::_exit(0);
  }
  std::vector<std::byte> data;
  ASSERT_FALSE(one.receive(0, {5, 0, 0, 1}, data));
  EXPECT_EQ(data.size(), 10u);
  EXPECT_EQ(one.receive(0, {5, 1, 0, 1}, data), "rank 1 waits for rank 0 (process 0, message 1): it has closed its connection");
  ::waitpid(child, nullptr, 0);
}

TEST_F(Mesh, ConnectionsWithoutTheSecretAreClosed) {
  ProcessMesh& stranger = *new ProcessMesh;
  int port = 0;
  ASSERT_FALSE(stranger.listen("127.0.0.1", "guess", port));
  ASSERT_FALSE(one.listen("127.0.0.1", "secret", port));
  stranger.set_peer(1, "127.0.0.1", port);
  stranger.start(0, std::chrono::milliseconds(300));
  (void)stranger.send(1, {5, 0, 0, 1}, "x", 1);
  std::vector<std::byte> data;
  EXPECT_EQ(one.receive(0, {5, 0, 0, 1}, data), "rank 1 waits for rank 0 (process 0, message 0): nothing has come within 300 ms");
}

}  // namespace
}  // namespace waybill::jax
