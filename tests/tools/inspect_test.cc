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

  static std::string config_file(const std::string& name) { return std::string(WAYBILL_SOURCE_DIR) + "/configs/" + name + ".toml"; }

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

// Parameters and active parameters in 1e9, and forward and backward GFLOP a token at sequence 4096, as published or inferred by others,
// each within half a unit of its last digit. None is computed by this code. Active counts embedding and head, but 80B-A3B does not:
// its name rounds down what a token visits without them.
TEST_F(Inspect, FullSizeConfigsAgreeWithPublishedSizes) {
  struct Row {
    const char* config;
    double total, active, gflop, total_bound, active_bound, gflop_bound;  // 0 = no such figure
  };
  const Row rows[] = {
      {"mixtral-8x7b", 46.7, 12.9, 79.7, 0.05, 0.05, 0.05},
      {"qwen3-30b-a3b", 30.5, 3.35, 23.0, 0.05, 0.005, 0.05},
      {"qwen3-235b-a22b", 235, 22.2, 148.0, 0.5, 0.05, 0.05},
      {"deepseek-v3", 671, 37.6, 260.0, 0.5, 0.05, 0.05},
      {"olmoe", 6.9, 1.3, 7.9, 0.05, 0.05, 0.05},
      {"sparse-2304", 45, 2.2, 13, 0.5, 0.05, 0.5},
      {"qwen3-next-80b-a3b", 80, 0, 0, 0.5, 0, 0},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.config);
    const nlohmann::json json = nlohmann::json::parse(run({"inspect", "model", config_file(row.config), "--json"}));
    const nlohmann::json& parameters = json.at("parameters");
    EXPECT_NEAR(parameters.at("total").get<double>() / 1e9, row.total, row.total_bound);
    if (row.active > 0) {
      EXPECT_NEAR(parameters.at("active").get<double>() / 1e9, row.active, row.active_bound);
    }
    if (row.gflop > 0) {
      EXPECT_NEAR(json.at("flops_per_token").at("total").get<double>() / 1e9, row.gflop, row.gflop_bound);
    }
  }
  const nlohmann::json next = nlohmann::json::parse(run({"inspect", "model", config_file("qwen3-next-80b-a3b"), "--json"})).at("parameters");
  const std::int64_t tables = next.at("embedding").get<std::int64_t>() + next.at("head").get<std::int64_t>();
  EXPECT_EQ((next.at("active").get<std::int64_t>() - tables) / 1'000'000'000, 3);
  EXPECT_NEAR(static_cast<double>(next.at("total").get<std::int64_t>() - tables) / 1e9, 79, 0.5);  // published: 79B without embeddings
}

TEST_F(Inspect, ModelSaysWhatIsCountedOnly) {
  const std::string text = run({"inspect", "model", config_file("qwen3-next-80b-a3b")});
  EXPECT_THAT(text, ::testing::HasSubstr("36 x gated delta net, E=512 K=10 F=512, shared F=512 with gate, P=32"));
  EXPECT_THAT(text, ::testing::HasSubstr("12 x grouped-query attention with output gate"));
  EXPECT_THAT(text, ::testing::HasSubstr("counted only, this engine does not train it: model.output_gate = true, model.full_attention_interval = 4, "
                                         "model.mtp_layers = 1, model.shared_gate = true"));
  const std::string trained = run({"inspect", "model", config_file("sparse-2304-tiny")});
  EXPECT_THAT(trained, ::testing::HasSubstr("1 x grouped-query attention, dense F=128"));
  EXPECT_THAT(trained, ::testing::Not(::testing::HasSubstr("counted only")));
  EXPECT_FALSE(nlohmann::json::parse(run({"inspect", "model", config_file("sparse-2304"), "--json"})).at("trained_by_this_engine").get<bool>());
}

TEST_F(Inspect, ModelOfUnequalLayers) {
  const std::filesystem::path file = folder_ / "mixed.toml";
  std::ofstream(file) << "[model]\nnum_layers = 3\nH = 64\n[moe]\nE = 8\nK = 2\nF = 32\n[parallel]\nP = 4\n[[layers]]\nindex = 1\n"
                         "moe.E = 16\nmoe.K = 4\nP = 2\n";
  const std::string text = run({"inspect", "model", file.string()});
  EXPECT_THAT(text, ::testing::HasSubstr("2 x grouped-query attention, E=8 K=2 F=32, P=4\n  1 x grouped-query attention, E=16 K=4 F=32, P=2\n"));
}

TEST_F(Inspect, SimulatePrintsTheModelWithItsLabel) {
  const std::string text = run({"simulate", "exchange", "-P", "2"});
  EXPECT_THAT(text, ::testing::StartsWith("model:"));
  EXPECT_THAT(text, ::testing::ContainsRegex("rank +0\\.997 +58\\.5 MB"));
}

TEST_F(Inspect, MemorySumsItsPartsAndSaysWhyThereIsNoGpuPart) {
  const nlohmann::json out = nlohmann::json::parse(run({"inspect", "memory", config_file("golden"), "--json"}));
  EXPECT_GT(out["ranks"].get<int>(), 0);
  std::int64_t sum = 0;
  for (const auto& [name, bytes] : out["cpu_rank"].items()) sum += name == "total" ? 0 : bytes.get<std::int64_t>();
  EXPECT_NEAR(static_cast<double>(sum), out["cpu_rank"]["total"].get<double>(), 8);
  EXPECT_TRUE(out["gpu"].is_null());  // only `waybill` itself makes training on GPUs known
  EXPECT_THAT(out["gpu_refused"].get<std::string>(), ::testing::HasSubstr("CUDA"));
  const std::string text = run({"inspect", "memory", config_file("golden")});
  EXPECT_THAT(text, ::testing::HasSubstr("prediction"));
  EXPECT_THAT(text, ::testing::HasSubstr("total"));
}

TEST_F(Inspect, MemoryGrowsWithTheBatch) {
  const auto total = [&](const std::string& batch) {
    return nlohmann::json::parse(run({"inspect", "memory", config_file("golden"), "--set", batch, "--json"}))["cpu_rank"]["activations"].get<double>();
  };
  EXPECT_NEAR(total("train.global_batch=16") / total("train.global_batch=8"), 2, 1e-6);
}

}  // namespace
}  // namespace waybill::cli
