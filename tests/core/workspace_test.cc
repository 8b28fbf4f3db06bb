// SPDX-License-Identifier: Apache-2.0
#include "waybill/workspace.h"

#include <gtest/gtest.h>

#include "waybill/status.h"

namespace waybill {
namespace {

TEST(Workspace, SizesAndPointersComeFromOneRecord) {
  WorkspacePlan plan;
  const std::size_t a = plan.book("a", 100);
  const std::size_t b = plan.book("b", 1000);
  EXPECT_EQ(a, 0u);
  EXPECT_EQ(b, WorkspacePlan::kAlignment);
  EXPECT_EQ(plan.total_bytes(), WorkspacePlan::kAlignment + 1024);
  const Buffer memory(plan.total_bytes());
  const Workspace workspace(memory.data(), memory.bytes());
  EXPECT_EQ(static_cast<void*>(workspace.at<char>(b, 1000)), static_cast<char*>(memory.data()) + 256);
  EXPECT_THROW(workspace.at<char>(b, 2000), Error);
}

TEST(Status, SaysWhatHappenedWithBothBudgets) {
  StatusWord status;
  EXPECT_EQ(describe(status), "ok");
  status.flags |= kStatusSlotOverflow;
  status.slot_demand = 512;
  status.slot_capacity = 300;
  status.row_demand = status.row_capacity = 128;
  EXPECT_EQ(describe(status), "receive overflow: slots 512 of 300, rows 128 of 128");
  status.clear();
  EXPECT_FALSE(status.overflowed());
}

}  // namespace
}  // namespace waybill
