// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <numeric>

#include "bench/loads.h"
#include "bench_loads.h"
#include "bench_measure.h"
#include "bench_problem.h"
#include "bench_record.h"
#include "waybill/error.h"

namespace waybill::cli {
namespace {

const std::string kShapes = std::string(WAYBILL_SOURCE_DIR) + "/bench/shapes/moe.toml";

TEST(BenchStatistics, PercentilesOfKnownSamples) {
  std::vector<double> samples;
  for (int i = 100; i >= 0; --i) samples.push_back(i);
  const Timing timing = summarise(samples);
  EXPECT_EQ(timing.iterations, 101);
  EXPECT_DOUBLE_EQ(timing.min_us, 0);
  EXPECT_DOUBLE_EQ(timing.p50_us, 50);
  EXPECT_DOUBLE_EQ(timing.p90_us, 90);
  EXPECT_DOUBLE_EQ(timing.p99_us, 99);
  EXPECT_DOUBLE_EQ(timing.spread(), 80.0 / 50);
  EXPECT_DOUBLE_EQ(percentile({1, 2}, 0.5), 1.5);
  EXPECT_EQ(percentile({}, 0.5), 0);
}

TEST(BenchStatistics, DataThatFitsTheCacheHasNoMemoryFloor) {
  EXPECT_EQ(memory_floor_us(1000, 1), 0);
  EXPECT_DOUBLE_EQ(memory_floor_us(1e13, 1e6), 1e7);
}

TEST(BenchStatistics, TheSlowestRankIsNamed) {
  BenchOptions options;
  options.iterations = 5;
  options.seconds = 1e-6;
  std::vector<Timing> timings(3);
  run_ranks(3, [&](Fabric& fabric) {
    timings[static_cast<std::size_t>(fabric.rank())] = measure_ranks(options, fabric, [&] {
      if (fabric.rank() == 1) usleep(20000);
    });
  });
  for (const Timing& timing : timings) {
    EXPECT_EQ(timing.slowest_rank, 1);
    EXPECT_EQ(timing.iterations, 5);
    EXPECT_GE(timing.min_us, 20000);
  }
}

TEST(BenchShapes, TheSharedFileIsReadAndEveryShapeIsLegal) {
  const std::vector<BenchShape> shapes = load_shapes(kShapes);
  std::vector<std::string> names;
  for (const BenchShape& shape : shapes) {
    names.push_back(shape.name);
    BenchOptions options;
    options.shapes_file = kShapes;
    options.shape = shape.name;
    if (shape.latent > 0) {
      EXPECT_THAT([&] { (void)options.resolve(); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr("latent width (1024): it is for"))) << shape.name;
      continue;
    }
    EXPECT_EQ(options.resolve().E, shape.E);
  }
  EXPECT_THAT(names, ::testing::IsSupersetOf({"deepseek-v3", "gpt-oss", "qwen2-moe", "kimi-k2.5", "sparse-2304", "deepseek-v3-slice", "qwen3-30b-a3b",
                                              "qwen3-235b-slice", "mixtral-slice", "proxy-512", "proxy-512-latent", "sparser-ep72", "sparser-2304"}));
}

TEST(BenchShapes, BadShapesAreRefusedWithFileAndName) {
  const std::string path = ::testing::TempDir() + "/shapes_" + std::to_string(getpid()) + ".toml";
  const auto error_of = [&](const std::string& text) -> std::string {
    std::ofstream(path) << text;
    try {
      load_shapes(path);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(error_of("[[shape]]\nname = 'a'\nE = 4\nK = 0\n"), ::testing::AllOf(::testing::HasSubstr(path), ::testing::HasSubstr("shape a: K is 0")));
  EXPECT_THAT(error_of("[[shape]]\nname = 'a'\nEE = 4\n"), ::testing::HasSubstr("unknown key 'EE'"));
  EXPECT_THAT(error_of("x = 1\n"), ::testing::HasSubstr("no [[shape]]"));
  EXPECT_THAT(error_of("[[shape\n"), ::testing::HasSubstr(path + ":1"));
  unlink(path.c_str());
}

// bench/loads.h, which reads no file, takes the defaults of waybill/workload.h for the ten loads: the file must say the same.
TEST(BenchLoads, F30_TheSharedFileHasTheTenLoadsWithTheDefaultsOfTheHeader) {
  const std::vector<NamedLoad> loads = load_loads(std::string(WAYBILL_SOURCE_DIR) + "/bench/shapes/loads.toml");
  ASSERT_EQ(loads.size(), static_cast<std::size_t>(kNumWorkloads));
  const WorkloadConfig defaults;
  for (int i = 0; i < kNumWorkloads; ++i) {
    const NamedLoad& load = loads[static_cast<std::size_t>(i)];
    EXPECT_EQ(load.config.workload, static_cast<Workload>(i));
    EXPECT_EQ(load.name, short_name(static_cast<Workload>(i)));
    EXPECT_EQ(load.config.zipf_exponent, defaults.zipf_exponent) << load.name;
    EXPECT_EQ(load.config.hot_factor, defaults.hot_factor) << load.name;
    EXPECT_EQ(load.config.hot_share, defaults.hot_share) << load.name;
  }
}

TEST(BenchLoads, BadLoadFilesAreRefusedWithFileAndName) {
  const std::string path = ::testing::TempDir() + "/loads_" + std::to_string(getpid()) + ".toml";
  const auto error_of = [&](const std::string& text) -> std::string {
    std::ofstream(path) << text;
    try {
      load_loads(path);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::string zipf = "[[load]]\nname = 'a'\nworkload = 'zipf'\n";
  EXPECT_EQ(error_of(zipf + "zipf_exponent = 2\n"), "accepted");
  EXPECT_THAT(error_of(zipf + "zipf_exponent = '2'\n"),
              ::testing::AllOf(::testing::HasSubstr(path), ::testing::HasSubstr("load a: zipf_exponent must be a number")));
  EXPECT_THAT(error_of(zipf + "hot_share = true\n"), ::testing::HasSubstr("load a: hot_share must be a number"));
  EXPECT_THAT(error_of(zipf + zipf), ::testing::HasSubstr("two loads are named a"));
  EXPECT_THAT(error_of(zipf + "exponent = 2\n"), ::testing::HasSubstr("unknown key 'exponent'"));
  EXPECT_THAT(error_of("[[load]]\nname = 'a'\n"), ::testing::HasSubstr("there is no workload ''"));
  unlink(path.c_str());
}

// The loads of programs outside `waybill bench` (bench/loads.h) are the oracle's counts, at any number of groups.
TEST(BenchLoads, F30_LoadsOfTheProgramsAreTheOraclesCounts) {
  struct Groups {
    std::int64_t L, rows;
  };
  for (const char* name : bench::kWorkloads) {
    for (const Groups& g : {Groups{16, 128}, Groups{64, 1}, Groups{1, 3}, Groups{3, 5}, Groups{8, 0}}) {
      const std::int64_t K = std::min<std::int64_t>(4, g.L);
      const WorkloadConfig config = bench::workload_of(name, g.L * g.rows / K, K, g.L);
      std::vector<std::int64_t> expected(static_cast<std::size_t>(g.L));
      for (const std::int32_t id : workload_ids(config)) ++expected[static_cast<std::size_t>(id)];
      EXPECT_EQ(bench::load_counts(name, g.L, g.rows), expected) << name << " L " << g.L << " rows " << g.rows;
      const std::vector<std::int32_t> offsets = bench::load_offsets(name, g.L, g.rows);
      ASSERT_EQ(offsets.size(), expected.size() + 1);
      for (std::size_t e = 0; e < expected.size(); ++e) EXPECT_EQ(offsets[e + 1] - offsets[e], expected[e]) << name;
    }
  }
  for (const char* name : bench::kShares) {
    for (const std::int64_t L : {1, 7}) {
      const std::vector<std::int64_t> counts = bench::load_counts(name, L, 10);
      EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), L * 10) << name;
    }
  }
  EXPECT_THROW(bench::load_counts("W10", 16, 128), Error);
  EXPECT_THROW(bench::load_counts("", 16, 128), Error);
  EXPECT_THROW(bench::load_offsets("even", 2, std::int64_t{1} << 30), Error);
}

// Every named load: rows conserved, ids distinct, the same tokens at any P, and the record says what the load was.
TEST(BenchLoads, F30_RowsAreConservedAndReportedForEveryLoad) {
  for (const char* name : {"W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W9"}) {
    BenchOptions options;
    options.load = name;
    options.seed = 5;
    std::vector<std::int64_t> expected;
    for (const int P : {1, 2, 4}) {
      BenchShape shape;
      shape.E = shape.router.E = 64;
      shape.K = shape.router.K = 4;
      shape.T = 128 / P;
      shape.P = P;
      const std::vector<Route> routes = make_load(options, shape, 3);
      const LoadSummary load = summarise_load(name, views_of(routes), 16);
      std::int64_t tokens = 0;
      std::vector<std::int64_t> counts(64);
      for (const Route& route : routes) {
        EXPECT_NO_THROW(validate(route.view())) << name;
        tokens += route.T();
        for (std::int64_t e = 0; e < 64; ++e) counts[static_cast<std::size_t>(e)] += route.view().counts[e];
      }
      EXPECT_EQ(load.real_rows, tokens * 4) << name;
      EXPECT_GE(load.padded_rows, load.real_rows) << name;
      EXPECT_NEAR(load.expert_rows.mean, static_cast<double>(tokens) * 4 / 64, 1e-9) << name;
      EXPECT_NEAR(load.rank_slots.mean * P, static_cast<double>(tokens) * 4, 1e-6) << name;
      EXPECT_LE(load.rank_rows.max, static_cast<double>(tokens)) << name;
      if (expected.empty()) expected = counts;
      EXPECT_EQ(counts, expected) << name << " at P = " << P;
    }
  }
}

// Case F30 part a: 8 tokens, E 256, K 8, P 16, balanced: 4 rows for each of 16 ranks, 64 in all.
TEST(BenchLoads, F30_BalancedLoadOf8TokensReachesEveryRankEqually) {
  BenchOptions options;
  options.load = "balanced";
  BenchShape shape;
  shape.E = shape.router.E = 256;
  shape.K = shape.router.K = 8;
  shape.T = 8;
  shape.P = 1;
  const std::vector<Route> routes = make_load(options, shape);
  std::vector<std::int64_t> rank_slots(16);
  for (std::int64_t e = 0; e < 256; ++e) rank_slots[static_cast<std::size_t>(e / 16)] += routes[0].view().counts[e];
  EXPECT_EQ(rank_slots, std::vector<std::int64_t>(16, 4));
  EXPECT_EQ(summarise_load("balanced", views_of(routes)).real_rows, 64);
}

// Case F30 part b: 255 experts with 32 rows and one with 4096, tiles of 128 rows: 287 tiles hold work; a common size would need 8192.
TEST(BenchLoads, F30_PaddedRowsFollowTheSumOfTilesNotTheHottestExpert) {
  constexpr std::int64_t E = 256, tile = 128;
  std::vector<std::int32_t> ids;
  for (std::int32_t e = 0; e < E; ++e) ids.insert(ids.end(), e == 0 ? 4096 : 32, e);
  const Route route = Route::from_ids(static_cast<std::int64_t>(ids.size()), 1, E, ids);
  const LoadSummary load = summarise_load("hot", {route.view()}, tile);
  EXPECT_EQ(load.padded_rows / tile, 287);
  EXPECT_EQ(E * ((static_cast<std::int64_t>(load.expert_rows.max) + tile - 1) / tile), 8192);
}

TEST(BenchReport, F30_ARecordStatesLoadRowsPercentilesAndSlowestRank) {
  BenchOptions options;
  options.load = "zipf";
  BenchShape shape;
  shape.E = shape.router.E = 16;
  shape.K = shape.router.K = 2;
  shape.H = shape.F = 8;
  shape.T = 32;
  shape.P = 2;
  BenchReport report(options, shape, 1);
  BenchRecord record;
  record.op = "exchange";
  record.variant = "round trip";
  record.timing = summarise({1, 2, 3});
  record.timing.slowest_rank = 1;
  record.load = summarise_load(options.load, views_of(make_load(options, shape)));
  report.set_checked(true);
  report.add(record);
  const nlohmann::json json = report.to_json();
  const nlohmann::json& row = json.at("records").at(0);
  for (const char* key :
       {"op",        "case",        "variant",       "metric", "unit",         "value",         "spread", "floor", "target",        "peers",
        "evidence",  "checked",     "p50",           "p90",    "p99",          "iterations",    "load",   "seed",  "rows_per_rank", "rows_per_expert",
        "real_rows", "padded_rows", "plan_included", "sms",    "slowest_rank", "implementation"}) {
    EXPECT_TRUE(row.contains(key)) << key;
  }
  for (const char* key : {"rows_per_rank", "rows_per_expert"}) {
    for (const char* part : {"min", "mean", "max"}) EXPECT_TRUE(row.at(key).contains(part)) << key << "." << part;
  }
  EXPECT_EQ(row.at("value"), 2.0);
  EXPECT_EQ(row.at("checked"), true);
  EXPECT_EQ(row.at("slowest_rank"), 1);
  EXPECT_EQ(row.at("real_rows"), 128);
  for (const char* key : {"commit", "date", "gpu", "cpu", "simd", "usable_cores"}) EXPECT_TRUE(json.at("header").contains(key)) << key;
}

}  // namespace
}  // namespace waybill::cli
