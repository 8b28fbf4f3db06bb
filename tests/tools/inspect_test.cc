// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "commands.h"
#include "inspect_verbs.h"
#include "waybill/error.h"
#include "waybill/route_io.h"

namespace waybill::cli {
namespace {

class Inspect : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / ("inspect_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& text) { std::ofstream(folder_ / "metrics.jsonl") << text; }

  // Standard output of `waybill ARGUMENTS`.
  static std::string run(std::vector<std::string> arguments) {
    CLI::App app{"test", "waybill"};
    register_inspect_command(app);
    register_simulate_command(app);
    std::reverse(arguments.begin(), arguments.end());
    ::testing::internal::CaptureStdout();
    try {
      app.parse(arguments);
    } catch (...) {
      ::testing::internal::GetCapturedStdout();
      throw;
    }
    return ::testing::internal::GetCapturedStdout();
  }

  std::filesystem::path folder_;
};

constexpr const char* kStep =
    R"({"kind":"step","step":1,"loss":2.5,"tokens_per_s":10,"phase_ms":{"router":1,"combine":3},"layers":[{"layer":2,"counts":[6,1,1,0],"rank_slots":[7,1]}]})";

TEST_F(Inspect, LoadNamesTheHottestExpertAndTheImbalance) {
  write(std::string(kStep) + "\n");
  const std::string text = run({"inspect", "load", folder_.string()});
  EXPECT_THAT(text, ::testing::HasSubstr("0 (75.0%)"));
  EXPECT_THAT(text, ::testing::ContainsRegex("3\\.00 +1\\.75"));  // 6 over mean 2; 7 over mean 4
  EXPECT_THAT(text, ::testing::HasSubstr("|611 |"));
}

TEST_F(Inspect, LoadComparesTrainingPhasesAndReadsRecordedRoutes) {
  std::string lines;
  for (int i = 1; i <= 4; ++i) {
    lines += R"({"kind":"step","step":)" + std::to_string(i) + R"(,"loss":2.5,"layers":[{"layer":2,"counts":)" + (i < 3 ? "[8,0]" : "[2,6]") +
             R"(,"rank_slots":[5,3]}]})" + "\n";
  }
  write(lines);
  const std::filesystem::path place = folder_ / "routes/step_00000001/layer_002";
  std::filesystem::create_directories(place);
  for (const char* name : {"rank_000.route", "rank_001.route"}) {
    save_route((place / name).string(), Route::from_ids(2, 2, 4, std::vector<std::int32_t>{0, 1, 2, 1}).view());
  }
  const std::string text = run({"inspect", "load", folder_.string(), "--phases", "2"});
  EXPECT_THAT(text, ::testing::ContainsRegex("1-2 +1 +2\\.00 +1\\.25 +0 +0 \\(100\\.0%\\)"));
  EXPECT_THAT(text, ::testing::ContainsRegex("3-4 +0 +1\\.50 +1\\.25 +0 +1 \\(75\\.0%\\)"));
  // Each source: row 0 to rank 0, row 1 to both: 4 and 2 rows over the ranks, 8 slots.
  EXPECT_THAT(text, ::testing::ContainsRegex("step_00000001/layer_002 +2 +4 +2\\.00 +1\\.33 +1\\.33"));
}

TEST_F(Inspect, RunShowsPhasesByTime) {
  write(std::string(R"({"kind":"header","name":"tiny","world":4})") + "\n" + kStep + "\n" + R"({"kind":"eval","step":1,"loss":2.25})" + "\n");
  const std::string text = run({"inspect", "run", folder_.string()});
  EXPECT_THAT(text, ::testing::HasSubstr("2.25"));
  EXPECT_LT(text.find("combine"), text.find("router"));
  EXPECT_THAT(text, ::testing::HasSubstr("75.0%"));
}

TEST_F(Inspect, BrokenRunFoldersAreErrorsWithFileAndLine) {
  const auto error_of = [&](const std::string& verb) -> std::string {
    try {
      run({"inspect", verb, folder_.string()});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(error_of("run"), ::testing::HasSubstr("metrics.jsonl is missing"));
  write("");
  EXPECT_THAT(error_of("run"), ::testing::HasSubstr("no step yet"));
  write(std::string("{broken\n") + kStep + "\n");
  EXPECT_THAT(error_of("load"), ::testing::HasSubstr("metrics.jsonl:1"));
  write(std::string(kStep) + "\n{\"kind\": \"st");  // torn last line: the run was killed
  EXPECT_EQ(error_of("load"), "accepted");
  std::filesystem::remove_all(folder_);
  EXPECT_THAT(error_of("run"), ::testing::HasSubstr("no such run folder"));
}

TEST_F(Inspect, RouteFileIsSummarisedPerRank) {
  const Route route = Route::from_ids(3, 2, 4, std::vector<std::int32_t>{0, 2, 3, 1, 2, 3});
  const std::string path = (folder_ / "a.route").string();
  save_route(path, route.view());
  const nlohmann::json json = nlohmann::json::parse(run({"inspect", "route", path, "-P", "2", "--json"}));
  EXPECT_EQ(json.at("rank_rows"), nlohmann::json({2, 3}));
  EXPECT_EQ(json.at("counts"), nlohmann::json({1, 1, 2, 2}));
  EXPECT_THAT(run({"inspect", "route", path, "-P", "2"}), ::testing::HasSubstr("5 rows, 6 slots (1.20 a row)\n  to rank 0: 2 rows, 2 slots"));
  EXPECT_THROW(run({"inspect", "route", path, "-P", "3"}), Error);
  EXPECT_THROW(run({"inspect", "route", path + ".missing"}), Error);
}

// Parameters and active parameters in 1e9, and forward and backward GFLOP a token, as published or computed from the published shapes.
TEST_F(Inspect, FullSizeConfigsAgreeWithPublishedSizes) {
  struct Row {
    const char* config;
    double total, active, gflop, total_bound, active_bound, gflop_bound;
  };
  const Row rows[] = {
      {"mixtral-8x7b", 46.7, 12.9, 79.7, 0.05, 0.05, 0.05},
      {"qwen3-30b-a3b", 30.5, 3.35, 23.0, 0.05, 0.005, 0.05},
      {"qwen3-235b-a22b", 235, 22.2, 148.0, 0.5, 0.05, 0.05},
      {"deepseek-v3", 671, 37.6, 260.0, 0.5, 0.05, 0.05},
      {"olmoe", 6.9, 1.3, 7.9, 0.05, 0.05, 0.05},
      {"sparse-2304", 45, 1.99, 11.8, 1, 0.005, 0.05},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.config);
    const std::string file = std::string(WAYBILL_SOURCE_DIR) + "/configs/" + row.config + ".toml";
    const nlohmann::json json = nlohmann::json::parse(run({"inspect", "model", file, "--json"}));
    EXPECT_NEAR(json.at("parameters").at("total").get<double>() / 1e9, row.total, row.total_bound);
    EXPECT_NEAR(json.at("parameters").at("active").get<double>() / 1e9, row.active, row.active_bound);
    EXPECT_NEAR(json.at("flops_per_token").at("total").get<double>() / 1e9, row.gflop, row.gflop_bound);
  }
}

TEST_F(Inspect, SimulatePrintsTheModelWithItsLabel) {
  const std::string text = run({"simulate", "exchange", "-P", "2"});
  EXPECT_THAT(text, ::testing::StartsWith("model:"));
  EXPECT_THAT(text, ::testing::ContainsRegex("rank +0\\.997 +58\\.5 MB"));
}

}  // namespace
}  // namespace waybill::cli
