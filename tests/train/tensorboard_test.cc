// SPDX-License-Identifier: Apache-2.0
#include "train/tensorboard.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "temp_folder.h"
#include "waybill/error.h"

namespace waybill {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

template <class T>
T at(const std::string& bytes, std::size_t offset) {
  T value{};
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// The events of a file, every check sum compared.
std::vector<std::string> events_of(const std::string& bytes) {
  std::vector<std::string> events;
  for (std::size_t i = 0; i < bytes.size();) {
    const auto length = at<std::uint64_t>(bytes, i);
    EXPECT_EQ(at<std::uint32_t>(bytes, i + 8), masked_crc32c(bytes.substr(i, 8)));
    events.push_back(bytes.substr(i + 12, length));
    EXPECT_EQ(at<std::uint32_t>(bytes, i + 12 + length), masked_crc32c(events.back()));
    i += 16 + length;
  }
  return events;
}

TEST(TensorBoard, CheckSumIsThatOfThePublishedVector) {
  const std::uint32_t masked = masked_crc32c("123456789") - 0xa282ead8u;
  EXPECT_EQ(masked >> 17 | masked << 15, 0xe3069283u);  // RFC 3720's polynomial, check value of the nine digits
}

TEST(TensorBoard, FileHoldsAVersionThenOneEventAStep) {
  const test::TempFolder folder;
  TensorBoardWriter writer(folder / "events", 1.5);
  const std::pair<std::string, double> scalars[] = {{"a", 0.5}};
  writer.write(300, 2.0, scalars);
  const std::vector<std::string> events = events_of(read(writer.path()));
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(at<double>(events[0], 1), 1.5);
  EXPECT_NE(events[0].find("brain.Event:2"), std::string::npos);
  // wall_time 2.0; step 300 = ac 02; summary of 10 bytes: a value of 8: tag "a", simple_value 0.5
  const char want[] = "\x09\0\0\0\0\0\0\0\x40\x10\xac\x02\x2a\x0a\x0a\x08\x0a\x01\x61\x15\0\0\0\x3f";
  EXPECT_EQ(events[1], std::string(want, sizeof want - 1));
}

TEST(TensorBoard, StepsCarryCountersOfLayersAndWaits) {
  const test::TempFolder folder;
  TensorBoardWriter writer(folder / "events", 1);
  StepMetrics m;
  m.step = 3, m.loss = 2.5;
  LayerMetrics& layer = m.layers.emplace_back();
  layer.layer = 2, layer.rank_rows = {4, 6}, layer.wait_us = {{0, 12}, {7, 0}};
  writer.write(m, 2);
  const std::string event = events_of(read(writer.path())).at(1);
  for (const char* tag : {"loss", "layer_002/rank_rows_mean", "layer_002/wait_us/rank_0_for_1", "layer_002/wait_us/rank_1_for_0"})
    EXPECT_NE(event.find(tag), std::string::npos) << tag;
  EXPECT_EQ(event.find("rank_0_for_0"), std::string::npos);
}

TEST(TensorBoard, AFolderThatCannotBeMadeIsNamed) {
  try {
    TensorBoardWriter("/dev/null/events", 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/dev/null/events"), std::string::npos);
  }
}

}  // namespace
}  // namespace waybill
