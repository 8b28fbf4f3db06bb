// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "capi_testing.h"

namespace waybill::capi_testing {
namespace {

// A folder with a text and a config of a model that trains in milliseconds.
class CApiTrain : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / ("capi_train_" + std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    std::ofstream text(folder_ / "text.txt");
    for (int i = 0; i < 400; ++i) text << "the quick brown fox jumps over the lazy dog\n";
    std::ofstream config(folder_ / "tiny.toml");
    config << "[model]\nH = 16\nnum_layers = 1\nnum_heads = 2\nnum_kv_heads = 2\nhead_dim = 8\nseq_len = 16\n"
           << "[moe]\nE = 4\nK = 2\nF = 16\n[parallel]\nP = 2\n"
           << "[train]\nsteps = 6\nglobal_batch = 4\nwarmup_steps = 1\nmeasure_ceiling = false\nsample_tokens = 4\n"
           << "[data]\ntext = \"" << (folder_ / "text.txt").string() << "\"\n";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::filesystem::path folder_;
};

struct Seen {
  std::int64_t steps = 0, stop_after = -1;
  double last_loss = 0;
};

std::int32_t watch(const wb_train_progress* progress, void* user) {
  auto* seen = static_cast<Seen*>(user);
  if (progress->event != WB_TRAIN_STEP) return 0;
  ++seen->steps;
  seen->last_loss = progress->loss;
  return progress->step == seen->stop_after ? 1 : 0;
}

TEST_F(CApiTrain, TrainsAConfigAndReportsEveryStep) {
  Seen seen;
  auto result = sized<wb_train_result>();
  const char* overrides[] = {"train.steps=5"};
  ASSERT_WB_OK(wb_train(path("tiny.toml").c_str(), overrides, 1, path("run").c_str(), 0, watch, &seen, &result));
  EXPECT_EQ(seen.steps, 5);
  EXPECT_EQ(result.step, 5);
  EXPECT_EQ(result.stopped, 0);
  EXPECT_TRUE(std::isfinite(result.held_out_loss));
  EXPECT_EQ(result.train_loss, seen.last_loss);
  EXPECT_TRUE(std::filesystem::exists(path("run") + "/metrics.jsonl"));
}

TEST_F(CApiTrain, TheCallbackStopsTheRunAndItResumes) {
  Seen seen;
  seen.stop_after = 2;
  auto result = sized<wb_train_result>();
  ASSERT_WB_OK(wb_train(path("tiny.toml").c_str(), nullptr, 0, path("run").c_str(), 0, watch, &seen, &result));
  EXPECT_EQ(result.stopped, 1);
  EXPECT_EQ(result.step, 2);
  Seen rest;
  ASSERT_WB_OK(wb_train(path("tiny.toml").c_str(), nullptr, 0, path("run").c_str(), 1, watch, &rest, &result));
  EXPECT_EQ(rest.steps, 4);
  EXPECT_EQ(result.step, 6);
}

TEST_F(CApiTrain, FaultsOfTheCallerAreStatusesWithText) {
  EXPECT_EQ(wb_train(path("missing.toml").c_str(), nullptr, 0, path("run").c_str(), 0, nullptr, nullptr, nullptr), WB_IO) << wb_last_error();
  EXPECT_THAT(wb_last_error(), ::testing::HasSubstr("missing.toml"));
  const char* typo[] = {"moe.KK=2"};
  EXPECT_EQ(wb_train(path("tiny.toml").c_str(), typo, 1, path("run").c_str(), 0, nullptr, nullptr, nullptr), WB_INVALID_ARGUMENT);
  EXPECT_THAT(wb_last_error(), ::testing::HasSubstr("moe.KK"));
  EXPECT_EQ(wb_train(nullptr, nullptr, 0, path("run").c_str(), 0, nullptr, nullptr, nullptr), WB_INVALID_ARGUMENT);
  wb_train_result wrong{};
  EXPECT_EQ(wb_train(path("tiny.toml").c_str(), nullptr, 0, path("run").c_str(), 0, nullptr, nullptr, &wrong), WB_INVALID_ARGUMENT);
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

}  // namespace
}  // namespace waybill::capi_testing
