// SPDX-License-Identifier: Apache-2.0
#include "waybill/status.h"

#include <gtest/gtest.h>

namespace waybill {
namespace {

StatusWord timeout_of(int rank) {
  StatusWord word;
  word.flags = kStatusTimeout;
  word.timeout_rank = rank;
  word.timeout_peer = rank + 10;
  word.timeout_phase = rank + 20;
  word.timeout_expected = rank + 30;
  word.timeout_seen = rank + 40;
  return word;
}

TEST(Status, MergeKeepsTheFirstTimeout) {
  StatusWord word;
  word.merge(timeout_of(1));
  word.merge(timeout_of(2));
  EXPECT_EQ(word.timeout_rank, 1);
  EXPECT_EQ(word.timeout_peer, 11);
  EXPECT_EQ(word.timeout_phase, 21);
  EXPECT_EQ(word.timeout_expected, 31);
  EXPECT_EQ(word.timeout_seen, 41);
  word.merge(StatusWord{});
  EXPECT_EQ(word.timeout_rank, 1);
  EXPECT_EQ(word.flags, kStatusTimeout);
}

TEST(Status, MergeOrsFlagsKeepsTheLargestDemandAndAddsCounters) {
  StatusWord a, b;
  a.flags = kStatusSlotOverflow;
  a.slot_demand = 7, a.slot_capacity = 4, a.row_demand = 1, a.row_capacity = 9;
  a.num_bad_ids = 1, a.num_nonfinite_rows = 2, a.num_short_rows = 3;
  b.flags = kStatusBadId;
  b.slot_demand = 5, b.slot_capacity = 6, b.row_demand = 3, b.row_capacity = 8;
  b.num_bad_ids = 10, b.num_nonfinite_rows = 20, b.num_short_rows = 30;
  a.merge(b);
  EXPECT_EQ(a.flags, kStatusSlotOverflow | kStatusBadId);
  EXPECT_EQ(a.slot_demand, 7);
  EXPECT_EQ(a.slot_capacity, 6);
  EXPECT_EQ(a.row_demand, 3);
  EXPECT_EQ(a.row_capacity, 9);
  EXPECT_EQ(a.num_bad_ids, 11);
  EXPECT_EQ(a.num_nonfinite_rows, 22);
  EXPECT_EQ(a.num_short_rows, 33);
}

}  // namespace
}  // namespace waybill
