// SPDX-License-Identifier: Apache-2.0
#include "table.h"

#include <gtest/gtest.h>

namespace waybill::cli {
namespace {

TEST(Table, NumbersStandRightAndTextLeft) {
  Table table({"name", "us"});
  table.add({"a", "1.5"});
  table.add({"longer", "120.0"});
  EXPECT_EQ(table.text(),
            "name       us\n"
            "a         1.5\n"
            "longer  120.0\n");
}

TEST(Table, EmptyTableIsItsHeader) { EXPECT_EQ(Table({"a", "b"}).text(), "a  b\n"); }

TEST(FormatBytes, UsesDecimalUnitsAndThreeDigits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(999), "999 B");
  EXPECT_EQ(format_bytes(1000), "1 kB");
  EXPECT_EQ(format_bytes(18.87e6), "18.9 MB");
  EXPECT_EQ(format_bytes(999.6e6), "1 GB");
}

}  // namespace
}  // namespace waybill::cli
