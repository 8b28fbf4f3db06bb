// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "doctor_machine.h"
#include "doctor_selftest.h"
#include "waybill/build_info.h"
#include "waybill/error.h"
#include "waybill/version.h"

namespace waybill::cli {
namespace {

TEST(Doctor, F29_SelfTestPassesWithinTenSeconds) {
  const std::vector<SelfCheckResult> results = run_self_checks(engine_self_checks());
  double seconds = 0;
  for (const SelfCheckResult& result : results) {
    EXPECT_EQ(result.failure, "") << result.name;
    seconds += result.seconds;
  }
  EXPECT_EQ(results.size(), engine_self_checks().size());
  EXPECT_EQ(self_check_exit_code(results), 0);
  EXPECT_LT(seconds, 10.0);
}

TEST(Doctor, F29_AFailedCheckGivesANonzeroExitCodeAndItsReason) {
  std::vector<SelfCheck> checks = engine_self_checks();
  checks.push_back({"broken on purpose", [] { WB_CHECK(1 + 1 == 3, "{} is not {}", 1 + 1, 3); }});
  const std::vector<SelfCheckResult> results = run_self_checks(checks);
  EXPECT_EQ(results.back().failure, "2 is not 3");
  EXPECT_EQ(self_check_exit_code(results), 1);
  EXPECT_EQ(self_check_exit_code({}), 1) << "a self-test without checks has not passed";
}

TEST(Doctor, F29_BuildInfoNamesVersionArchsAndFeatures) {
  const std::string text = describe(build_info());
  EXPECT_THAT(text, ::testing::HasSubstr(WB_VERSION_STRING));
  EXPECT_THAT(text, ::testing::HasSubstr("cuda archs: "));
  EXPECT_THAT(text, ::testing::HasSubstr("fabric:threads"));
}

TEST(Doctor, EveryMissingProgramComesWithAWayToMendIt) {
  for (const Finding& finding : examine_machine()) {
    EXPECT_FALSE(finding.topic.empty());
    EXPECT_FALSE(finding.found.empty()) << finding.topic;
    EXPECT_TRUE(finding.found != "not found" || !finding.advice.empty()) << finding.topic;
  }
}

TEST(Doctor, FirstLineOfAFailingCommandIsEmpty) {
  EXPECT_EQ(first_line_of("printf 'one\\ntwo\\n'"), "one");
  EXPECT_EQ(first_line_of("echo out; exit 3"), "");
  EXPECT_GT(memory_bytes("MemTotal"), 0);
  EXPECT_EQ(memory_bytes("NoSuchLine"), 0);
}

}  // namespace
}  // namespace waybill::cli
