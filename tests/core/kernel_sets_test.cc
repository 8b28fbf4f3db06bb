// SPDX-License-Identifier: Apache-2.0
#include "core/kernel_sets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <thread>
#include <vector>

namespace waybill::detail {
namespace {

struct Set {
  const char* name;
  int lanes;
};
constexpr Set kWide{"avx512", 16}, kMiddle{"avx2", 8}, kPlain{"portable", 1};

class KernelSetsTest : public ::testing::Test {
 protected:
  void TearDown() override { unsetenv("WB_FORCE"); }
};

TEST_F(KernelSetsTest, UsableAreThoseOfTheMachineBestFirst) {
  KernelSets<Set> all("gemm", &kWide, &kMiddle, kPlain);
  std::vector<const Set*> expected;
  if (cpu_has_avx512()) expected.push_back(&kWide);
  if (cpu_has_avx2()) expected.push_back(&kMiddle);
  expected.push_back(&kPlain);
  EXPECT_EQ(std::vector<const Set*>(all.usable().sets, all.usable().sets + all.usable().count), expected);
  EXPECT_EQ(all.selected(), expected.front());
  KernelSets<Set> elsewhere("gemm", nullptr, nullptr, kPlain);
  EXPECT_EQ(elsewhere.usable().count, 1);
  EXPECT_EQ(elsewhere.selected(), &kPlain);
}

TEST_F(KernelSetsTest, ForceNamesASetOrTheReferenceUntilItIsTakenBack) {
  KernelSets<Set> sets("gemm", nullptr, nullptr, kPlain);
  sets.force("ref");
  EXPECT_EQ(sets.selected(), nullptr);
  sets.force("portable");
  EXPECT_EQ(sets.selected(), &kPlain);
  EXPECT_THAT([&] { sets.force("avx9"); }, ::testing::ThrowsMessage<Error>("gemm implementation \"avx9\" was asked for; this machine can run: ref, portable"));
  EXPECT_EQ(sets.selected(), &kPlain) << "a refused name changes nothing";
  setenv("WB_FORCE", "gemm:ref", 1);
  sets.force("");
  EXPECT_EQ(sets.selected(), nullptr);
}

TEST_F(KernelSetsTest, TheEnvironmentIsReadAtTheFirstUse) {
  setenv("WB_FORCE", "gemm:avx9", 1);
  KernelSets<Set> sets("gemm", nullptr, nullptr, kPlain);
  EXPECT_EQ(sets.usable().count, 1);
  EXPECT_THROW(sets.selected(), Error);
  setenv("WB_FORCE", "gemm:ref", 1);  // the refusal is not the last word
  EXPECT_EQ(sets.selected(), nullptr);
  unsetenv("WB_FORCE");
  EXPECT_EQ(sets.selected(), nullptr);
}

TEST_F(KernelSetsTest, ThreadsThatAskAtOnceGetOneAnswer) {
  KernelSets<Set> sets("gemm", &kWide, &kMiddle, kPlain);
  std::vector<const Set*> seen(8);
  std::vector<std::thread> threads;
  threads.reserve(seen.size());
  for (const Set*& mine : seen) threads.emplace_back([&sets, &mine] { mine = sets.selected(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(seen, std::vector<const Set*>(seen.size(), sets.usable().sets[0]));
}

}  // namespace
}  // namespace waybill::detail
