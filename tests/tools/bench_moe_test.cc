// SPDX-License-Identifier: Apache-2.0
// bench moe: unequal results are never timed; loads come from the shared file or from a recording.
#include "bench_moe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "bench_run.h"
#include "waybill/route_io.h"

namespace waybill::cli {
namespace {

const std::string kFolder = std::string(WAYBILL_SOURCE_DIR) + "/bench/shapes/";

StackOutputs some_outputs() { return {{1, 2, 3, 4}, {5, 6, 7, 8}, {1}, {2, 3}, {4}, {1, 1}}; }

TEST(MoeBenchCheck, ADifferenceIsFoundInEveryResult) {
  const StackOutputs wanted = some_outputs();
  EXPECT_EQ(difference(wanted, wanted, false), "");
  StackOutputs seen = wanted;
  seen.out[2] += 0.01f;
  EXPECT_THAT(difference(seen, wanted, false), ::testing::HasSubstr("out differs"));
  seen = wanted;
  seen.dx[0] = NAN;
  EXPECT_THAT(difference(seen, wanted, false), ::testing::HasSubstr("dx differs"));
  for (const auto& [member, name] : {std::pair{&StackOutputs::d_gate, "the gate's"}, {&StackOutputs::d_w1, "w1's"}, {&StackOutputs::d_w2, "w2's"}}) {
    seen = wanted;
    (seen.*member)[0] *= 1.01f;
    EXPECT_THAT(difference(seen, wanted, false), ::testing::HasSubstr(name));
    EXPECT_EQ(difference(seen, wanted, true), "");  // where routes were dropped, weight gradients differ rightly
  }
  seen = wanted;
  seen.out[1] = 0;
  seen.whole = {0, 1};  // token 0 lost a route
  EXPECT_EQ(difference(seen, wanted, true), "");
  seen.out[3] = 0;
  EXPECT_THAT(difference(seen, wanted, true), ::testing::HasSubstr("out differs"));
}

TEST(MoeBenchCheck, UnequalResultsOfOneRankStopEveryRank) {
  int stopped = 0;
  std::mutex mutex;
  const std::string message = error_of([&] {
    run_ranks(3, [&](Fabric& fabric) {
      try {
        refuse_unequal(fabric, "loop", "");
        refuse_unequal(fabric, "padded", fabric.rank() == 1 ? "dx differs" : "");
      } catch (const Error&) {
        const std::lock_guard lock(mutex);
        ++stopped;
        throw;
      }
    });
  });
  EXPECT_EQ(stopped, 3);
  EXPECT_THAT(message, ::testing::HasSubstr("padded does not agree with sparse on 1 rank(s), so nothing is timed: dx differs"));
}

TEST(MoeBench, AllStacksAndTheAblationAreCheckedCountedAndRecorded) {
  const std::string path = ::testing::TempDir() + "/moe_bench_" + std::to_string(getpid()) + ".json";
  const std::string text =
      run_bench({"bench", "moe", "--shapes", kFolder + "moe.toml", "--shape", "demo",      "-E",    "8",      "-K", "2", "-H", "8", "-F", "8", "-T",
                 "16",    "-P",  "2",        "--iterations",       "1",       "--seconds", "0.001", "--json", path});
  for (const char* word : {"loop", "padded", "capacity", "block-sparse", "dense-map", "+ compact routes", "+ local probability slice", "+ row lists",
                           "+ fast top-k", "checked against the reference"}) {
    EXPECT_THAT(text, ::testing::HasSubstr(word));
  }
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file);
  std::map<std::string, double> values;
  for (const nlohmann::json& record : json.at("records")) {
    EXPECT_EQ(record.at("checked"), true);
    EXPECT_EQ(record.at("evidence"), "MoE module");
    values[record.at("variant").get<std::string>() + " / " + record.at("metric").get<std::string>()] = record.at("value").get<double>();
  }
  // Two ranks of 16 tokens: a byte map of 8 experts, or 2 ids of 2 bytes.
  EXPECT_EQ(values.at("ablation dense-map: forward + backward / bytes ids"), 2 * 16 * 8);
  EXPECT_EQ(values.at("ablation + compact routes: forward + backward / bytes ids"), 2 * 16 * 2 * 2);
  EXPECT_EQ(values.at("sparse: forward + backward / rows real"), 64);
  EXPECT_EQ(values.at("ablation dense-map: forward + backward / scores visited"), 32 * 8 * 3);
  EXPECT_GT(values.at("loop: forward / time"), 0);
  EXPECT_GE(values.at("capacity: forward + backward / dropped routes"), 0);
  std::filesystem::remove(path);
}

TEST(MoeBench, OptionsOfTheOtherDeviceAreRefused) {
  const auto refused = [](std::vector<std::string> more) {
    more.insert(more.begin(), {"bench", "moe", "--shapes", kFolder + "moe.toml"});
    return error_of([&] { (void)run_bench(more); });
  };
  for (const char* option : {"--receive-factor=1.5", "--f32-gradients", "--wgrad-control", "--column-blocks=2", "--eager=none", "--most-seconds=2",
                             "--recipe=fp8", "--no-peer", "--trace=t.json", "--plot=p.html", "--python=python3"}) {
    EXPECT_THAT(refused({option}), ::testing::HasSubstr("needs --device cuda")) << option;
  }
  EXPECT_THAT(refused({"--device", "cuda", "--tokens", "8"}), ::testing::HasSubstr("--tokens is for --device cpu"));
  EXPECT_THAT(refused({"--device", "cuda", "--receive-factor", "nan"}), ::testing::HasSubstr("--receive-factor"));
}

TEST(BenchLoads, F30_TheSharedFileHoldsTheTenLoads) {
  const std::vector<NamedLoad> loads = load_loads(kFolder + "loads.toml");
  ASSERT_EQ(loads.size(), static_cast<std::size_t>(kNumWorkloads));
  for (std::size_t i = 0; i < loads.size(); ++i) {
    EXPECT_EQ(loads[i].name, short_name(static_cast<Workload>(i)));
    EXPECT_EQ(loads[i].config.workload, static_cast<Workload>(i));
    EXPECT_FALSE(loads[i].about.empty());
  }
  EXPECT_EQ(loads[2].config.hot_factor, 10.0);  // W2: one expert 10 times the mean
}

TEST(BenchLoads, ParametersOfTheFileReachTheRoutes) {
  const std::string path = ::testing::TempDir() + "/loads_" + std::to_string(getpid()) + ".toml";
  BenchOptions options;
  options.loads_file = path;
  options.load = "hotter";
  BenchShape shape;
  shape.E = 32, shape.K = 1, shape.T = 3200, shape.P = 1;
  const auto hottest = [&](const std::string& factor) {
    std::ofstream(path) << "[[load]]\nname = 'hotter'\nworkload = 'hot_expert'\nhot_factor = " << factor << "\n";
    const std::vector<Route> routes = make_load(options, shape);
    return *std::max_element(routes[0].view().counts, routes[0].view().counts + 32);
  };
  EXPECT_NEAR(static_cast<double>(hottest("4.0")), 400, 40);  // the mean is 100
  EXPECT_NEAR(static_cast<double>(hottest("16.0")), 1600, 160);
  const auto refused = [&](const std::string& text) {
    std::ofstream(path) << text;
    return error_of([&] { make_load(options, shape); });
  };
  EXPECT_THAT(refused("[[load]]\nname = 'hotter'\nfactor = 1\n"), ::testing::AllOf(::testing::HasSubstr(path), ::testing::HasSubstr("unknown key 'factor'")));
  EXPECT_THAT(refused("[[load]]\nname = 'hotter'\nworkload = 'warm'\n"), ::testing::HasSubstr("no workload 'warm'"));
  EXPECT_THAT(refused("[[load]]\nname = 'other'\nworkload = 'zipf'\n"), ::testing::HasSubstr("no load 'hotter'"));
  std::filesystem::remove(path);
}

TEST(BenchLoads, RecordedRoutesAreReplayedAtAnyNumberOfRanks) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / ("recorded_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const Route a = Route::from_ids(3, 2, 8, std::vector<std::int32_t>{0, 1, 2, 3, 4, 5}), b = Route::from_ids(1, 2, 8, std::vector<std::int32_t>{7, 6});
  save_route((folder / "rank_000.route").string(), a.view());
  save_route((folder / "rank_001.route").string(), b.view());
  BenchOptions options;
  options.shapes_file = kFolder + "moe.toml";
  options.load = "recorded:" + folder.string();
  BenchShape shape = options.resolve();
  EXPECT_EQ(shape.E, 8);
  EXPECT_EQ(shape.K, 2);
  EXPECT_EQ(shape.P, 2);
  EXPECT_EQ(make_load(options, shape)[0].T(), 3);  // as recorded
  options.P = 4;
  shape = options.resolve();
  const std::vector<Route> split = make_load(options, shape);
  ASSERT_EQ(split.size(), 4u);
  for (std::size_t t = 0; t < 4; ++t) {
    ASSERT_EQ(split[t].T(), 1);
    const Route& source = t < 3 ? a : b;
    for (std::int64_t k = 0; k < 2; ++k) EXPECT_EQ(split[t].view().id(0, k), source.view().id(t < 3 ? static_cast<std::int64_t>(t) : 0, k));
  }
  const std::string text = run_bench({"bench", "moe", "--shapes", options.shapes_file, "--load", options.load, "-H", "8", "-F", "8", "--iterations", "1",
                                      "--seconds", "0.001", "--stacks", "loop"});
  EXPECT_THAT(text, ::testing::HasSubstr("routes are replayed"));
  options.E = 16;
  EXPECT_THAT(error_of([&] { options.resolve(); }), ::testing::HasSubstr("cannot be given"));
  std::filesystem::rename(folder / "rank_001.route", folder / "rank_002.route");
  EXPECT_THAT(error_of([&] { load_recorded(options.load); }), ::testing::HasSubstr("rank_001.route is missing, but routes of 2 ranks are there"));
  std::filesystem::remove(folder / "rank_002.route");
  save_route((folder / "rank_001.route").string(), Route(1, 2, 16).view());
  EXPECT_THAT(error_of([&] { load_recorded(options.load); }), ::testing::HasSubstr("E = 16, but rank 0"));
  std::filesystem::remove_all(folder);
  EXPECT_THAT(error_of([&] { load_recorded(options.load); }), ::testing::HasSubstr("no rank_000.route"));
}

}  // namespace
}  // namespace waybill::cli
