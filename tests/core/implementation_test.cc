// SPDX-License-Identifier: Apache-2.0
#include "core/implementation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "waybill/log.h"

namespace waybill {
namespace {

using testing::HasSubstr;

std::string refusal_of(const char* force) {
  setenv("WB_FORCE", force, 1);
  std::string text = "accepted";
  try {
    forced_implementation("router");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    text = error.what();
  }
  unsetenv("WB_FORCE");
  return text;
}

TEST(Implementation, ForceNamesOneEntryOfAnOp) {
  setenv("WB_FORCE", "gemm:portable,router:ref", 1);
  EXPECT_EQ(forced_implementation("router"), "ref");
  EXPECT_EQ(forced_implementation("gemm"), "portable");
  EXPECT_EQ(forced_implementation("activation"), "");
  unsetenv("WB_FORCE");
  EXPECT_EQ(forced_implementation("router"), "");
}

TEST(Implementation, ForceOfAnUnknownOpIsRefusedWhicheverOpAsks) {
  EXPECT_THAT(refusal_of("routr:ref"),
              HasSubstr("WB_FORCE names op 'routr', known are activation, gemm, gemm_activation, quantize, quantize_activated, router"));
  EXPECT_THAT(refusal_of("router:ref,gem:portable"), HasSubstr("names op 'gem'"));
  EXPECT_THAT(refusal_of("router"), HasSubstr("WB_FORCE holds 'router', expected <op>:<implementation>"));
  EXPECT_EQ(refusal_of("gemm:portable"), "accepted");
}

TEST(Implementation, ASelectionIsLoggedWhereTheCommandShowsIt) {
  LogLevel seen = LogLevel::kDebug;
  std::string line;
  set_log_callback([&](LogLevel level, const std::string& text) { seen = level, line = text; });
  log_selection("router", "fast", "cuda: takes CUDA memory, got cpu");
  set_log_callback({});
  EXPECT_EQ(seen, LogLevel::kInfo);
  EXPECT_EQ(line, "select router: fast; refused: cuda: takes CUDA memory, got cpu");
}

}  // namespace
}  // namespace waybill
