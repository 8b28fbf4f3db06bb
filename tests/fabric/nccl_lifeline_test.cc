// SPDX-License-Identifier: Apache-2.0
// Which rank is gone: real processes that end, sleep or leave, two nodes of two ranks. Needs no GPU.
#include <gmock/gmock.h>

#include "fabric/lifeline_processes.h"

namespace waybill::cuda {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;

TEST(NcclLifeline, AnEndedProcessIsNamedByRanksThatHaveNoConnectionToIt) {
  const auto body = [](int rank, std::unique_ptr<Lifeline> line) {
    if (rank == 3) ::_exit(7);
    const int lost = wait_for_loss(*line);
    if (lost != 3 || line->loss() != Loss::kEnded) return 1;
    line->tell(lost, line->loss());
    if (rank != 0) std::this_thread::sleep_for(milliseconds(100));
    ::_exit(line->lost() == 3 ? 0 : 2);  // the first loss stands, though these processes end, too
  };
  EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 7));
}

TEST(NcclLifeline, ASleepingProcessIsNamedAndNotTakenForAnEndedOne) {
  int gate[2] = {};
  ASSERT_EQ(::pipe(gate), 0);
  const auto body = [&](int rank, std::unique_ptr<Lifeline> line) {
    if (rank == 3) {  // sleeps until the others have done
      char byte = 0;
      for (int i = 0; i < kRanks - 1; ++i) (void)!::read(gate[0], &byte, 1);
      return wait_for_loss(*line) == 3 && line->loss() == Loss::kSilent ? 0 : 1;  // the others gave it up
    }
    const std::vector<int> silent = line->ask(milliseconds(rank == 0 ? 4000 : 1000)).silent;
    // A neighbour of the sleeping rank finds it, or is told by the other that has; rank 0 is no neighbour and is told.
    const bool is_told = line->lost() == 3 && line->loss() == Loss::kSilent, found = rank != 0 && silent == std::vector<int>{3};
    line->tell(3, Loss::kSilent);
    std::this_thread::sleep_for(milliseconds(200));
    (void)!::write(gate[1], "!", 1);
    return found || is_told ? 0 : 2;
  };
  EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 0));
  ::close(gate[0]), ::close(gate[1]);
}

TEST(NcclLifeline, ARankThatLeavesInOrderIsNotLostButDoesNotAnswer) {
  const auto body = [](int rank, std::unique_ptr<Lifeline> line) {
    if (rank == 3) return 0;  // its lifeline says so
    const std::vector<int> silent = line->ask(milliseconds(1500)).silent;
    const bool is_lost = line->lost() >= 0;
    std::this_thread::sleep_for(milliseconds(rank == 0 ? 500 : 3000));  // nobody leaves while another asks
    if (is_lost) return 1;
    return silent == (rank == 0 ? std::vector<int>{} : std::vector<int>{3}) ? 0 : 2;
  };
  EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 0));
}

TEST(NcclLifeline, NeighboursThatWaitThemselvesAnswer) {
  const auto body = [](int, std::unique_ptr<Lifeline> line) {
    const Lifeline::Answers answers = line->ask(milliseconds(1000));
    const bool is_lost = line->lost() >= 0;
    std::this_thread::sleep_for(milliseconds(1000));
    return answers.silent.empty() && answers.late.empty() && !is_lost ? 0 : 1;
  };
  EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 0));
}

// Whoever has come furthest asks; the other number wraps.
TEST(NcclLifeline, ANeighbourThatAnswersAndHasNotComeIsLateAndOthersAreToldOfIt) {
  for (const std::uint32_t furthest : {7u, 2u}) {
    const auto body = [&](int rank, std::unique_ptr<Lifeline> line) {
      line->report(furthest - (rank == 3 ? 5u : 0u));
      if (rank == 1) {
        const Lifeline::Answers answers = line->ask(milliseconds(2000));
        if (line->lost() >= 0 || !answers.silent.empty() || answers.late != std::vector<int>{3}) return 1;
        line->tell(3, Loss::kLate);
        std::this_thread::sleep_for(milliseconds(200));
        return 0;
      }
      const bool is_told = wait_for_loss(*line) == 3 && line->loss() == Loss::kLate;  // 2 has no connection to 1
      line->tell(3, line->loss());
      std::this_thread::sleep_for(milliseconds(200));
      return is_told ? 0 : 2;
    };
    EXPECT_THAT(run_lifelines(body), ElementsAre(0, 0, 0, 0)) << furthest;
  }
}

}  // namespace
}  // namespace waybill::cuda
