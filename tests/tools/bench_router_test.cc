// SPDX-License-Identifier: Apache-2.0
// bench router --load: the router's ids are the load's to the last one, or the load is refused before anything runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "bench_router_load.h"
#include "bench_router_problem.h"
#include "bench_run.h"
#include "waybill/route_io.h"

namespace waybill::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kFolder = std::string(WAYBILL_SOURCE_DIR) + "/bench/shapes/";
const std::vector<std::string> kLoads = {"W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W9"};

BenchShape shape_of(std::int64_t T, std::int64_t E, std::int64_t K, ScoreFunction score) {
  BenchShape shape;
  shape.T = T;
  shape.E = shape.router.E = E;
  shape.K = shape.router.K = K;
  shape.router.score = score;
  return shape;
}

BenchOptions options_of(const std::string& load, const std::string& dtype = "fp32") {
  BenchOptions options;
  options.shapes_file = kFolder + "moe.toml";
  options.loads_file = kFolder + "loads.toml";
  options.load = load;
  options.dtype = dtype;
  options.seed = 7;
  return options;
}

// Runs the router over the problem's logits and compares with its load.
std::string route_and_compare(RouterProblem& problem) {
  router_forward(problem.config, problem.inputs, problem.outputs());
  return error_of([&] { expect_routes(problem.route, problem.wanted, problem.load); });
}

TEST(RouterBench, F30_TheRouterGivesEveryLoadToTheLastId) {
  for (const std::string& load : kLoads) {
    for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
      for (const std::string dtype : {"fp32", "bf16", "fp16"}) {
        SCOPED_TRACE(load + " " + dtype + " score " + std::to_string(static_cast<int>(score)));
        const BenchShape shape = shape_of(96, 64, 4, score);
        const BenchOptions options = options_of(load, dtype);
        RouterProblem problem(options, shape, router_load(options, shape));
        EXPECT_EQ(problem.shape.T, load == "W9" ? 24 : 96);
        EXPECT_EQ(route_and_compare(problem), "accepted");
      }
    }
  }
}

TEST(RouterBench, LoadsOfManyExpertsAndOfAllExpertsAreExact) {
  for (const std::string dtype : {"fp32", "bf16", "fp16"}) {
    for (const auto& [E, K] : {std::pair<std::int64_t, std::int64_t>{2304, 36}, {384, 8}, {64, 64}, {7, 1}}) {
      SCOPED_TRACE(dtype + " E " + std::to_string(E));
      const BenchShape shape = shape_of(40, E, K, ScoreFunction::kSigmoid);
      const BenchOptions options = options_of("W1", dtype);
      RouterProblem problem(options, shape, router_load(options, shape));
      EXPECT_EQ(route_and_compare(problem), "accepted");
    }
  }
}

// A row's values are those of the random logits: they change places and the chosen ones move apart by little.
TEST(RouterBench, ALoadKeepsTheDistributionOfTheLogits) {
  const BenchShape shape = shape_of(64, 128, 8, ScoreFunction::kSigmoid);
  const BenchOptions options = options_of("W3");
  const RouterProblem random(options, shape), loaded(options, shape, router_load(options, shape));
  double moved = 0;
  for (std::ptrdiff_t t = 0; t < 64; ++t) {
    std::vector<float> a(random.logits_f32.begin() + t * 128, random.logits_f32.begin() + (t + 1) * 128);
    std::vector<float> b(loaded.logits_f32.begin() + t * 128, loaded.logits_f32.begin() + (t + 1) * 128);
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_NEAR(a[i], b[i], 0.01) << "token " << t;
      moved += a[i] != b[i];
    }
  }
  EXPECT_LT(moved, 64 * 8 * 0.2);
  EXPECT_NE(random.logits_f32, loaded.logits_f32);
}

TEST(RouterBench, GroupLimitedRoutingTakesLoadsOfKeptGroupsAndRefusesOthers) {
  BenchShape shape = shape_of(3, 16, 3, ScoreFunction::kSigmoid);
  shape.name = "grouped";
  shape.router.num_groups = 4;
  shape.router.num_kept_groups = 2;
  for (const GroupScore score : {GroupScore::kTop2Sum, GroupScore::kTopKPerGroup}) {
    shape.router.group_score = score;
    // One group, two groups, two groups with one expert in each but one.
    RouterProblem problem(options_of("mine"), shape, Route::from_ids(3, 3, 16, std::vector<std::int32_t>{2, 0, 1, 15, 4, 12, 7, 9, 8}));
    EXPECT_EQ(route_and_compare(problem), "accepted");
  }
  // One expert in each of four groups of eight: without the other experts of these groups being raised too, groups without a route would be kept.
  BenchShape spread = shape_of(200, 64, 4, ScoreFunction::kSigmoid);
  spread.router.num_groups = 8;
  spread.router.num_kept_groups = 4;
  std::vector<std::int32_t> ids;
  for (std::int32_t t = 0; t < 200; ++t) {
    for (std::int32_t k = 0; k < 4; ++k) ids.push_back((t * 3 + k * 2) % 8 * 8 + (t * 5 + k) % 8);
  }
  RouterProblem problem(options_of("mine"), spread, Route::from_ids(200, 4, 64, ids));
  EXPECT_EQ(route_and_compare(problem), "accepted");
  EXPECT_THAT(error_of([&] {
                RouterProblem(options_of("mine"), shape, Route::from_ids(2, 3, 16, std::vector<std::int32_t>{0, 1, 2, 0, 5, 10}));
              }),
              AllOf(HasSubstr("--load mine: the experts of token 1 are in 3 groups"), HasSubstr("shape grouped keeps 2 of 4"), HasSubstr("-E 16")));
  BenchOptions options = options_of("W0");
  options.shape = "deepseek-v3";
  options.T = 16;
  EXPECT_THAT(error_of([&] { make_router_problem(options); }), AllOf(HasSubstr("shape deepseek-v3 keeps 4 of 8"), HasSubstr("-E 256 routes without groups")));
  options.E = 256;
  RouterProblem without_groups = make_router_problem(options);
  EXPECT_EQ(route_and_compare(without_groups), "accepted");
}

TEST(RouterBench, RowsWithFewerRoutesHaveNoOtherCandidate) {
  const BenchShape shape = shape_of(3, 8, 2, ScoreFunction::kSoftmax);
  RouterProblem problem(options_of("mine"), shape, Route::from_ids(3, 2, 8, std::vector<std::int32_t>{-1, 5, -1, -1, 7, 0}));
  EXPECT_EQ(route_and_compare(problem), "accepted");
  EXPECT_EQ(problem.route.view().id(0, 0), 5);
  EXPECT_EQ(problem.route.view().id(1, 0), -1);
}

TEST(RouterBench, AnIdThatIsNotTheLoadsIsNamed) {
  const Route wanted = Route::from_ids(2, 2, 8, std::vector<std::int32_t>{1, 2, 3, 4}), seen = Route::from_ids(2, 2, 8, std::vector<std::int32_t>{1, 2, 4, 3});
  EXPECT_THAT(error_of([&] { expect_routes(seen, wanted, "W1"); }), HasSubstr("--load W1: token 1, slot 0: the router chose expert 4 where the load has 3"));
  EXPECT_THAT(error_of([&] { expect_routes(Route(2, 2, 9), wanted, "W1"); }), HasSubstr("over 9 experts"));
  EXPECT_EQ(error_of([&] { expect_routes(wanted, wanted, "W1"); }), "accepted");
}

// Every benchmark of the command takes every load, recorded routes too, checks its results under it, and says which one it was.
class EveryBench : public ::testing::Test {
 protected:
  ~EveryBench() override { std::filesystem::remove(path_); }
  nlohmann::json records_of(const std::string& verb, const std::string& load, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {
        "bench", verb, "--shapes", kFolder + "moe.toml", "--loads", kFolder + "loads.toml", "--load", load,        "-H",    "8",      "-F",
        "8",     "-P", "2",        "--threads",          "1",       "--iterations",         "1",      "--seconds", "0.001", "--json", path_.string()};
    if (verb == "moe") arguments.insert(arguments.end(), {"--stacks", "loop"});
    arguments.insert(arguments.end(), more.begin(), more.end());
    run_bench(arguments);
    std::ifstream file(path_);
    nlohmann::json records = nlohmann::json::parse(file).at("records");
    EXPECT_FALSE(records.empty());
    for (const nlohmann::json& record : records) {
      EXPECT_EQ(record.at("load"), load);
      EXPECT_EQ(record.at("checked"), true);
    }
    return records;
  }
  std::filesystem::path path_ = std::filesystem::path(::testing::TempDir()) / ("bench_loads_" + std::to_string(getpid()) + ".json");
};

TEST_F(EveryBench, F30_RunsEveryLoad) {
  for (const std::string verb : {"router", "gemm", "exchange", "moe"}) {
    for (const std::string& load : kLoads) {
      SCOPED_TRACE(verb + " " + load);
      const nlohmann::json record = records_of(verb, load, {"-T", "16", "-E", "8", "-K", "2"}).at(0);
      if (load == "W3") {
        EXPECT_EQ(record.at("rows_per_expert").at("max").get<double>(), record.at("real_rows").get<double>() / 2);  // one expert in every row
      }
    }
  }
}

TEST_F(EveryBench, F30_ReplaysRecordedRoutes) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / ("every_bench_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  save_route((folder / "rank_000.route").string(), Route::from_ids(2, 2, 8, std::vector<std::int32_t>{0, 1, 3, 0}).view());
  save_route((folder / "rank_001.route").string(), Route::from_ids(1, 2, 8, std::vector<std::int32_t>{0, 6}).view());
  for (const std::string verb : {"router", "gemm", "exchange", "moe"}) {
    SCOPED_TRACE(verb);
    const nlohmann::json record = records_of(verb, "recorded:" + folder.string(), {}).at(0);
    EXPECT_EQ(record.at("real_rows"), 6);
    EXPECT_EQ(record.at("rows_per_expert").at("max"), 3.0);
  }
  std::filesystem::remove_all(folder);
}

TEST(RouterBench, UnknownLoadsAndRecordings) {
  EXPECT_THAT(error_of([] {
                run_bench({"bench", "router", "--shapes", kFolder + "moe.toml", "--loads", kFolder + "loads.toml", "--load", "W17", "-T", "4"});
              }),
              HasSubstr("no load 'W17'"));
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / ("router_recorded_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  save_route((folder / "rank_000.route").string(), Route::from_ids(2, 2, 8, std::vector<std::int32_t>{0, 1, 3, 2}).view());
  save_route((folder / "rank_001.route").string(), Route::from_ids(1, 2, 8, std::vector<std::int32_t>{7, 6}).view());
  RouterProblem problem = make_router_problem(options_of("recorded:" + folder.string()));
  EXPECT_EQ(problem.shape.T, 3);  // the tokens of all ranks
  EXPECT_EQ(route_and_compare(problem), "accepted");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace waybill::cli
