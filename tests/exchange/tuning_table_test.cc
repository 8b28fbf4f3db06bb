// SPDX-License-Identifier: Apache-2.0
// Tuning of the exchange as data: what a file may say, and which row serves which size.
#include "exchange/tuning_table.h"

#include <gmock/gmock.h>

#include "waybill/error.h"

namespace waybill {
namespace {

using testing::HasSubstr;

std::string refusal(const std::string& text) {
  try {
    (void)parse_tuning(text, "a.tuning");
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(TuningTable, TheRowOfTheSmallestSizeThatHoldsServes) {
  const TuningTable table{{1024, 1, 1, 1, 1, 1, 1, 1, 1}, {8192, 2, 1, 1, 1, 1, 1, 1, 1}};
  EXPECT_EQ(tuning_for(table, 16).dispatch_ctas, 1);
  EXPECT_EQ(tuning_for(table, 1024).dispatch_ctas, 1);
  EXPECT_EQ(tuning_for(table, 1025).dispatch_ctas, 2);
  EXPECT_EQ(tuning_for(table, 1 << 20).dispatch_ctas, 2);
}

TEST(TuningTable, TheBuiltInTableIsWhatWasMeasured) {
  EXPECT_EQ(tuning_for(built_in_tuning(), 14336).dispatch_ctas, 14);
  EXPECT_EQ(tuning_for(built_in_tuning(), 7168).dispatch_ctas, 16);
  EXPECT_EQ(tuning_for(built_in_tuning(), 4096).fused_combine_ctas, 24);
  EXPECT_EQ(tuning_for(built_in_tuning(), 1024).dispatch_ctas, 18);
  EXPECT_EQ(tuning_for(built_in_tuning(), 1024).fused_combine_ctas, 0);
  EXPECT_EQ(tuning_for(built_in_tuning(), 14336).fused_combine_ctas, 16);
}

TEST(TuningTable, WhatIsWrittenIsRead) {
  EXPECT_EQ(parse_tuning(format_tuning(built_in_tuning()), "built in"), built_in_tuning());
  EXPECT_EQ(parse_tuning("# two rows\n\n1024 20 24 32 16 2 6 0 2   # short\n16384 14 24 32 16 2 6 32 2\r\n", "a").size(), 2u);
}

TEST(TuningTable, ALineOfTheCpuEngineStandsBesideTheRows) {
  const CpuTuning tuning{128, 16, 8};
  EXPECT_EQ(parse_cpu_tuning(format_tuning(tuning), "a"), tuning);
  EXPECT_EQ(parse_tuning(format_tuning(tuning), "a"), built_in_tuning());  // rows are missing
  const std::string both = format_tuning(tuning) + "1024 20 24 32 16 2 6 0 2\n";
  EXPECT_EQ(parse_cpu_tuning(both, "a"), tuning);
  EXPECT_EQ(parse_tuning(both, "a").size(), 1u);
  EXPECT_EQ(parse_cpu_tuning("1024 20 24 32 16 2 6 0 2\n", "a"), CpuTuning{});
}

TEST(TuningTable, TheCpuEngineTakesWhatIsSet) {
  const CpuTuning before = cpu_tuning();
  set_cpu_tuning({5, 6, 7});
  EXPECT_EQ(cpu_tuning(), (CpuTuning{5, 6, 7}));
  EXPECT_THROW(set_cpu_tuning({0, 6, 7}), Error);
  EXPECT_EQ(cpu_tuning(), (CpuTuning{5, 6, 7}));
  set_cpu_tuning(before);
}

TEST(TuningTable, BrokenFilesAreRefusedWithLineAndValue) {
  EXPECT_THAT(refusal(""), HasSubstr("a.tuning: a table of tuning without a row"));
  EXPECT_THAT(refusal("# nothing\n"), HasSubstr("without a row"));
  EXPECT_THAT(refusal("1024 20 24 32 16 2 6 0\n"), HasSubstr("a.tuning:1: fused_stages is missing"));
  EXPECT_THAT(refusal("\n1024 20 many 32 16 2 6 0 2\n"), HasSubstr("a.tuning:2: chunk_ctas is missing or no whole number"));
  EXPECT_THAT(refusal("1024 20 24 32 16 2 6 0 2 7\n"), HasSubstr("\"7\" behind the last number"));
  EXPECT_THAT(refusal("1024 0 24 32 16 2 6 0 2\n"), HasSubstr("dispatch_ctas = 0 is outside [1, 1024]"));
  EXPECT_THAT(refusal("1024 20 24 32 17 2 6 0 2\n"), HasSubstr("combine_warps = 17 is outside [1, 16]"));
  EXPECT_THAT(refusal("-4 20 24 32 16 2 6 0 2\n"), HasSubstr("row_bytes must be a positive whole number"));
  EXPECT_THAT(refusal("1024 20 24 32 16 2 6 0 2\n1024 20 24 32 16 2 6 0 2\n"), HasSubstr("a.tuning:2: row_bytes = 1024 behind 1024; rows must ascend"));
  EXPECT_THAT(refusal("cpu 64 32\n"), HasSubstr("a.tuning:1: sum_tokens is missing"));
  EXPECT_THAT(refusal("cpu 64 0 32\n"), HasSubstr("permute_rows = 0 is outside [1, 1048576]"));
  EXPECT_THAT(refusal("cpu 64 32 32 1\n"), HasSubstr("\"1\" behind the last number"));
  EXPECT_THAT(refusal("cpu 64 32 32\ncpu 64 32 32\n"), HasSubstr("a.tuning:2: a second line \"cpu\""));
  EXPECT_THAT(refusal("99999999999999999999 20 24 32 16 2 6 0 2\n"), HasSubstr("row_bytes must be"));
}

}  // namespace
}  // namespace waybill
