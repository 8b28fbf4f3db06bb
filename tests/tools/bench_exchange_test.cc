// SPDX-License-Identifier: Apache-2.0
// `waybill bench exchange --tune`: what it writes, what it keeps, what it refuses.
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench_run.h"
#include "exchange/tuning_table.h"

namespace waybill::cli {
namespace {

using testing::HasSubstr;

const std::string kFolder = std::string(WAYBILL_SOURCE_DIR) + "/bench/shapes/";
constexpr const char* kGpuRow = "1024 20 24 32 16 2 6 0 2";

class TuneExchange : public testing::Test {
 protected:
  TuneExchange() { std::filesystem::remove_all(folder_), std::filesystem::create_directories(folder_); }
  ~TuneExchange() override { std::filesystem::remove_all(folder_); }
  std::string file() const { return (folder_ / "a.tuning").string(); }
  static std::string read(const std::string& path) {
    std::ifstream in(path);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }
  static void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
  std::vector<std::string> arguments(std::vector<std::string> more) const {
    std::vector<std::string> all{"bench",        "exchange",
                                 "-T",           "24",
                                 "-H",           "16",
                                 "-E",           "8",
                                 "-K",           "2",
                                 "-F",           "16",
                                 "-P",           "2",
                                 "--seconds",    "1e-6",
                                 "--iterations", "1",
                                 "--shapes",     kFolder + "moe.toml",
                                 "--loads",      kFolder + "loads.toml"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

 private:
  std::filesystem::path folder_ = std::filesystem::temp_directory_path() / ("waybill_tune_" + std::to_string(::getpid()));
};

TEST_F(TuneExchange, WritesATableThatTheExchangeReadsAndLeavesTheProcessAsItWas) {
  const CpuTuning before = cpu_tuning();
  const std::string shown = run_bench(arguments({"--tune", file()}));
  EXPECT_EQ(cpu_tuning(), before);
  const std::string text = read(file());
  EXPECT_THAT(text, HasSubstr("# waybill bench exchange --tune, cpu: T=24 H=16 E=8 K=2 P=2 fp32"));
  const CpuTuning found = parse_cpu_tuning(text, file());
  for (const int grain : {found.copy_rows, found.permute_rows, found.sum_tokens}) EXPECT_THAT((std::vector{16, 32, 64, 128, 256}), testing::Contains(grain));
  EXPECT_EQ(parse_tuning(text, file()), built_in_tuning());  // no row of GPUs
  EXPECT_THAT(shown, HasSubstr("tune dispatch: threads="));
  EXPECT_THAT(shown, HasSubstr("round trip, tuned"));
  EXPECT_THAT(shown, HasSubstr("checked against the reference"));
}

TEST_F(TuneExchange, KeepsTheRowsOfGpusThatTheFileHas) {
  write(file(), std::string("# of another day\ncpu 1 2 3\n") + kGpuRow + "\n");
  (void)run_bench(arguments({"--tune", file(), "--threads", "1"}));
  const std::string text = read(file());
  EXPECT_THAT(text, HasSubstr(kGpuRow));
  EXPECT_EQ(parse_tuning(text, file()).size(), 1u);
  EXPECT_NE(parse_cpu_tuning(text, file()), (CpuTuning{1, 2, 3}));
}

TEST_F(TuneExchange, JsonHasEveryCandidateThatWasTimed) {
  const std::string json = file() + ".json";
  (void)run_bench(arguments({"--tune", file(), "--threads", "1", "--json", json}));
  const auto records = nlohmann::json::parse(read(json)).at("records");
  ASSERT_GE(records.size(), 3u * 5 + 2);
  for (const auto& record : records) {
    EXPECT_EQ(record.at("op"), "exchange");
    EXPECT_GT(record.at("p50").get<double>(), 0);
    EXPECT_EQ(record.at("checked"), true);
  }
  EXPECT_THAT(records.back().at("variant").get<std::string>(), HasSubstr("round trip, tuned: threads=1 copy_rows="));
}

TEST_F(TuneExchange, WhatIsNoTableIsRefusedAndKept) {
  write(file(), "a poem\n");
  EXPECT_THAT(error_of([&] { (void)run_bench(arguments({"--tune", file()})); }), HasSubstr("a.tuning:1: row_bytes must be a positive whole number"));
  EXPECT_EQ(read(file()), "a poem\n");
  const std::string nowhere = file() + "/no/such/folder";
  std::filesystem::remove(file());
  EXPECT_THAT(error_of([&] { (void)run_bench(arguments({"--tune", nowhere})); }), HasSubstr("cannot write " + nowhere));
}

TEST_F(TuneExchange, GpusAreOnlyTuned) {
  EXPECT_THAT(error_of([&] { (void)run_bench(arguments({"--device", "cuda"})); }), HasSubstr("--device cuda needs --tune FILE"));
  EXPECT_THAT(error_of([&] { (void)run_bench(arguments({"--tune", ""})); }), HasSubstr("--tune needs the name of a file"));
}

TEST_F(TuneExchange, WithoutAGpuNothingIsWritten) {
  const std::string error = error_of([&] { (void)run_bench(arguments({"--device", "cuda", "--tune", file()})); });
  if (error == "accepted") GTEST_SKIP() << "this machine has a GPU";
  EXPECT_THAT(error, HasSubstr("--device cuda"));
  EXPECT_FALSE(std::filesystem::exists(file()));
}

TEST(TuningTableRows, ARowTakesItsPlace) {
  const TuningTable table{{4095, 9, 9, 9, 9, 9, 9, 9, 9}, {8191, 8, 8, 8, 8, 8, 8, 8, 8}};
  const RowTuning row{4095, 1, 2, 3, 4, 5, 6, 7, 1}, larger{5000, 1, 2, 3, 4, 5, 6, 7, 1};
  EXPECT_EQ(with_row(table, row), (TuningTable{row, table[1]}));
  EXPECT_EQ(with_row(table, larger), (TuningTable{table[0], larger, table[1]}));
}

}  // namespace
}  // namespace waybill::cli
