// SPDX-License-Identifier: Apache-2.0
#include "waybill/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>

#include "error_text.h"
#include "run_helper.h"
#include "train/rank_trainer.h"
#include "train/sampler.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::error_text;
using test::read_file;
using test::Recording;
using test::RunFolder;
using test::write_file;
using testing::HasSubstr;

std::vector<json> lines_of(const std::string& path) {
  std::vector<json> lines;
  std::istringstream text(read_file(path));
  for (std::string line; std::getline(text, line);) lines.push_back(json::parse(line));
  return lines;
}

// name -> checksum of every saved tensor.
std::map<std::string, std::string> tensor_sums(const std::string& checkpoint) {
  std::map<std::string, std::string> sums;
  const json index = json::parse(read_file(checkpoint + "/index.json"));
  for (const json& t : index["body"]["tensors"]) sums[t["name"]] = t["crc"];
  EXPECT_FALSE(sums.empty()) << checkpoint;
  return sums;
}

std::string latest_of(const RunFolder& folder, const std::string& run) { return latest_checkpoint(folder.run(run) + "/checkpoints"); }

// Relative, over 8 steps: sums of fp32 terms in another order, amplified by training.
constexpr double kCurveBound = 5e-6;

// The auxiliary loss is off here: its counts are those of a micro-batch, so it is another loss when a step is cut into other parts.
TEST(TrainerTest, LossCurveIsTheSameAtAnyLayoutAndMicroBatchCount) {
  RunFolder folder;
  const auto run = [&](int P, int D, int micro_batches) {
    Recording r;
    folder.train(fmt::format("{}-{}-{}", P, D, micro_batches),
                 {fmt::format("parallel.P={}", P), fmt::format("parallel.D={}", D), fmt::format("train.micro_batches={}", micro_batches), "train.steps=8",
                  "train.global_batch=16", "train.sample_tokens=0", "moe.aux_coefficient=0"},
                 r);
    return std::pair(r.losses, r.norms);
  };
  const auto one = run(1, 1, 1);
  ASSERT_EQ(one.first.size(), 8u);
  double worst = 0;
  for (const auto& [P, D, M] : {std::tuple(4, 1, 1), std::tuple(2, 2, 1), std::tuple(1, 4, 1), std::tuple(4, 1, 4), std::tuple(1, 1, 4)}) {
    const auto other = run(P, D, M);
    for (std::size_t i = 0; i < one.first.size(); ++i) {
      SCOPED_TRACE(fmt::format("P={} D={} micro-batches={} step {}", P, D, M, i + 1));
      const double difference = std::abs(other.first[i] / one.first[i] - 1);
      worst = std::max(worst, difference);
      EXPECT_LE(difference, i == 0 ? 1e-6 : kCurveBound);
      EXPECT_NEAR(other.second[i] / one.second[i], 1, 1e-3);
    }
  }
  std::printf("largest relative difference of a loss: %.3g\n", worst);
  EXPECT_LT(one.first.back(), one.first.front() - 0.5);  // it does train
}

// Layer 1: 8 experts over 4 ranks. Layer 2: 4 experts, top-1, in two groups of 2 ranks. The same model on one rank has the same losses.
TEST(TrainerTest, LayersMayDifferInExpertsTopKAndGroups) {
  RunFolder folder;
  const auto run = [&](int P, std::int64_t P_of_layer_2) {
    RunConfig config =
        folder.config({fmt::format("parallel.P={}", P), "train.steps=5", "train.sample_tokens=0", "model.num_layers=3", "train.micro_batches=1"});
    config.layers.push_back({{2},
                             {{"P", P_of_layer_2},
                              {"moe.E", std::int64_t{4}},
                              {"moe.K", std::int64_t{1}},
                              {"router.num_groups", std::int64_t{1}},
                              {"router.num_kept_groups", std::int64_t{1}}}});
    resolve(config);
    TrainOptions options;
    options.run_dir = folder.run(fmt::format("layers{}", P));
    Recording r;
    train(config, options, &r);
    EXPECT_EQ(r.steps.back().layers.at(1).counts.size(), 4u);
    EXPECT_EQ(r.steps.back().layers.at(1).rank_slots.size(), static_cast<std::size_t>(P_of_layer_2));
    return r.losses;
  };
  const std::vector<double> four = run(4, 2), one = run(1, 1);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(four[i] / one[i], 1, kCurveBound) << "step " << i + 1;
}

// Two virtual nodes of two ranks. A row goes once to the other node, forward and back, so the bytes of one step are bounded.
TEST(TrainerTest, MetricsCountTheBytesBetweenNodes) {
  RunFolder folder;
  const auto run = [&](const std::string& hierarchy, int ranks_per_node) {
    Recording r;
    folder.train(fmt::format("{}-{}", hierarchy, ranks_per_node),
                 {"exchange.hierarchy=" + hierarchy, fmt::format("parallel.ranks_per_node={}", ranks_per_node), "moe.K=4", "router.num_kept_groups=4",
                  "train.steps=5", "train.sample_tokens=0"},
                 r);
    return r.steps.back();
  };
  const StepMetrics two = run("two_level", 2), flat = run("flat", 2), single = run("flat", 0);
  EXPECT_EQ(single.bytes.between_nodes, 0);
  EXPECT_EQ(single.bytes.rows_between_nodes, 0);
  EXPECT_GT(flat.bytes.between_nodes, two.bytes.between_nodes);
  EXPECT_GT(flat.bytes.rows_between_nodes, two.bytes.rows_between_nodes);
  EXPECT_GT(two.bytes.rows_between_nodes, 0);
  EXPECT_LE(two.bytes.rows_between_nodes, 2 * two.tokens);  // one MoE layer: the last step does not hold the ones before
  EXPECT_GT(two.bytes.between_nodes, two.bytes.rows_between_nodes);
  EXPECT_LT(two.bytes.between_nodes, two.bytes.total());
  const json written = lines_of(folder.run("two_level-2") + "/metrics.jsonl").at(5).at("bytes");
  EXPECT_EQ(written.at("between_nodes"), two.bytes.between_nodes);
  EXPECT_EQ(written.at("rows_between_nodes"), two.bytes.rows_between_nodes);
  EXPECT_EQ(written.at("rows"), two.bytes.rows);
  EXPECT_EQ(written.size(), 12u);
}

TEST(TrainerTest, ARepeatIsBitEqual) {
  RunFolder folder;
  Recording a, b, threads;
  const TrainResult first = folder.train("a", {}, a), second = folder.train("b", {}, b);
  folder.train("threads", {"train.threads=3"}, threads);
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  EXPECT_EQ(a.losses, threads.losses);
  EXPECT_EQ(first.held_out_loss, second.held_out_loss);
  EXPECT_EQ(first.sample, second.sample);
  EXPECT_EQ(tensor_sums(latest_of(folder, "a")), tensor_sums(latest_of(folder, "b")));
  Recording other;
  folder.train("seed", {"train.seed=2"}, other);
  EXPECT_NE(a.losses, other.losses);
}

TEST(TrainerCases, F28_ResumeAtTheSamePIsBitEqual) {
  RunFolder folder;
  Recording whole, first, rest;
  first.stop_after = 17;  // beside the checkpoint interval of 10
  const TrainResult expected = folder.train("whole", {}, whole);
  const TrainResult stopped = folder.train("parts", {}, first);
  EXPECT_TRUE(stopped.stopped);
  EXPECT_EQ(stopped.step, 17);
  const TrainResult result = folder.train("parts", {}, rest, true);
  EXPECT_FALSE(result.stopped);
  std::vector<double> joined = first.losses;
  joined.insert(joined.end(), rest.losses.begin(), rest.losses.end());
  EXPECT_EQ(joined, whole.losses);
  EXPECT_EQ(result.held_out_loss, expected.held_out_loss);
  EXPECT_EQ(result.sample, expected.sample);
  EXPECT_EQ(tensor_sums(latest_of(folder, "parts")), tensor_sums(latest_of(folder, "whole")));
}

TEST(TrainerCases, F28_ReloadAtAnotherPKeepsEveryBitAndTheNextLoss) {
  RunFolder folder;
  Recording first;
  first.stop_after = 10;
  folder.train("base", {"parallel.P=2"}, first);
  Recording same;
  fs::copy(folder.run("base"), folder.run("p2"), fs::copy_options::recursive);
  folder.train("p2", {"parallel.P=2", "train.steps=11", "train.sample_tokens=0"}, same, true);
  ASSERT_EQ(same.losses.size(), 1u);
  for (const int P : {1, 4}) {
    SCOPED_TRACE(P);
    const std::string name = fmt::format("p{}", P);
    const RunConfig config = folder.config({fmt::format("parallel.P={}", P)});
    // Every weight, moment, bias and counter, written again from the new layout, has the same bits.
    const std::string saved = latest_of(folder, "base");
    run_ranks(P, [&](Fabric& world) {
      ThreadPool pool(1);
      RankTrainer trainer(config, world, &pool);
      trainer.load(saved);
      trainer.save(folder / ("again_" + name));
    });
    EXPECT_EQ(tensor_sums(latest_checkpoint(folder / ("again_" + name))), tensor_sums(saved));
    Recording next;
    fs::copy(folder.run("base"), folder.run(name), fs::copy_options::recursive);
    folder.train(name, {fmt::format("parallel.P={}", P), "train.steps=11", "train.sample_tokens=0"}, next, true, true);
    ASSERT_EQ(next.losses.size(), 1u);
    EXPECT_NEAR(next.losses[0] / same.losses[0], 1, 1e-6);
  }
}

TEST(TrainerTest, ABadResumeIsRefusedAndChangesNothing) {
  RunFolder folder;
  Recording r;
  folder.train("run", {"train.steps=10", "train.sample_tokens=0"}, r);
  const std::string config_before = read_file(folder.run("run") + "/config.toml"), metrics_before = read_file(folder.run("run") + "/metrics.jsonl");
  const auto resume = [&](std::vector<std::string> overrides) {
    overrides.push_back("train.steps=20");
    return error_text([&] { folder.train("run", overrides, r, true); });
  };
  EXPECT_THAT(resume({"parallel.P=2"}), HasSubstr("was saved with P = 4, D = 1, the config says P = 2, D = 1; --reshard resumes at another size"));
  EXPECT_THAT(resume({"model.H=64"}), HasSubstr("holds another model: it was saved with `[model] H = 32`, the config says `[model] H = 64`"));
  EXPECT_THAT(resume({"moe.E=12"}), HasSubstr("`[moe] E = 8`, the config says `[moe] E = 12`"));
  EXPECT_THAT(resume({"train.seed=5"}), HasSubstr("train.seed = 1, the config says 5"));
  EXPECT_THAT(error_text([&] { folder.train("none", {}, r, true); }), HasSubstr("run folder " + folder.run("none") + " does not exist"));
  EXPECT_THAT(error_text([&] { folder.train("run", {"train.steps=5", "train.warmup_steps=2"}, r, true); }), HasSubstr("is at step 10, beyond train.steps = 5"));
  EXPECT_THAT(error_text([&] { folder.train("run", {}, r); }), HasSubstr("exists and is not empty"));
  const std::string data = latest_of(folder, "run") + "/data_0000.bin", good = read_file(data);
  write_file(data, good.substr(0, 100));
  EXPECT_THAT(resume({}), HasSubstr("data_0000.bin has 100 bytes"));
  write_file(data, good);
  EXPECT_EQ(read_file(folder.run("run") + "/config.toml"), config_before);
  EXPECT_EQ(read_file(folder.run("run") + "/metrics.jsonl"), metrics_before);
}

TEST(TrainerTest, NothingIsLeftOfARunThatCannotStart) {
  RunFolder folder;
  Recording r;
  EXPECT_THAT(error_text([&] { folder.train("a", {"moe.K=9"}, r); }), HasSubstr("moe.K = 9 exceeds moe.E = 8"));
  EXPECT_THAT(error_text([&] { folder.train("b", {"moe.E=6"}, r); }), HasSubstr("moe.E = 6 is not divisible by P = 4"));
  EXPECT_THAT(error_text([&] { folder.train("c", {"model.seq_len=20000"}, r); }), HasSubstr("text too short"));
  for (const char* name : {"a", "b", "c"}) EXPECT_FALSE(fs::exists(folder.run(name))) << name;
}

// A budget that is too small: the step is computed again with a larger one, and the losses are those of exact sizes, bit for bit.
TEST(TrainerTest, OverflowedStepsAreRunAgainAndChangeNothing) {
  RunFolder folder;
  Recording eager, captured;
  folder.train("eager", {"train.steps=12", "train.sample_tokens=0"}, eager);
  const TrainResult result =
      folder.train("captured", {"train.steps=12", "train.sample_tokens=0", "exchange.mode=captured", "exchange.receive_factor=0.6"}, captured);
  EXPECT_GT(result.reruns, 0);
  EXPECT_FALSE(captured.notes.empty());
  EXPECT_EQ(captured.losses, eager.losses);
  EXPECT_EQ(captured.norms, eager.norms);
  double factor = 0.6;
  std::int64_t reruns = 0;
  for (const StepMetrics& m : captured.steps) {
    EXPECT_TRUE(m.reruns > 0 ? m.receive_factor > factor : m.receive_factor == factor);
    EXPECT_LE(m.receive_factor, 4);
    factor = m.receive_factor;
    reruns += m.reruns;
  }
  EXPECT_EQ(reruns, result.reruns);
  // A resumed run starts from the budget that was reached.
  Recording more;
  folder.train("captured", {"train.steps=13", "train.sample_tokens=0", "exchange.mode=captured", "exchange.receive_factor=0.6"}, more, true);
  ASSERT_EQ(more.steps.size(), 1u);
  EXPECT_GE(more.steps[0].receive_factor, factor);
}

// Evaluated batches may need more than the steps did; the run goes on with a larger budget, and every loss is that of exact sizes.
TEST(TrainerTest, AnOverflowInAnEvaluationDoesNotEndTheRun) {
  RunFolder folder;
  Recording eager, captured;
  const std::vector<std::string> common = {"train.steps=6", "train.warmup_steps=2", "train.eval_every=1", "train.sample_tokens=0"};
  const auto with = [&common](std::vector<std::string> more) {
    more.insert(more.end(), common.begin(), common.end());
    return more;
  };
  const TrainResult exact = folder.train("eager", with({}), eager);
  const TrainResult result = folder.train("captured", with({"exchange.mode=captured", "exchange.receive_factor=1"}), captured);
  const auto is_of_evaluation = [](const std::string& note) { return note.find("overflowed in the evaluation") != std::string::npos; };
  EXPECT_TRUE(std::any_of(captured.notes.begin(), captured.notes.end(), is_of_evaluation));
  EXPECT_EQ(captured.losses, eager.losses);
  EXPECT_EQ(result.held_out_loss, exact.held_out_loss);
}

TEST(TrainerTest, AGradientThatIsNotFiniteChangesNothing) {
  RunFolder folder;
  const RunConfig config = folder.config();
  const Dataset data = Dataset::load(config.data, 256, config.model.seq_len);
  run_ranks(4, [&](Fabric& world) {
    ThreadPool pool(1);
    RankTrainer trainer(config, world, &pool);
    ASSERT_TRUE(trainer.step(data, 0).valid);
    Parameter& p = trainer.model().parameters()[0];
    ASSERT_EQ(p.value.dim(0), 256) << p.name;  // the embedding table
    for (std::int64_t t = 0; t < 40; ++t) p.value.as<float>()['e' * config.model.H + t % config.model.H] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> before;
    for (const Parameter& q : trainer.model().parameters()) before.insert(before.end(), q.value.as<float>(), q.value.as<float>() + q.value.size());
    const StepMetrics metrics = trainer.step(data, 1);
    EXPECT_FALSE(metrics.valid);
    EXPECT_EQ(metrics.total_skipped, 1);
    std::vector<float> after;
    for (const Parameter& q : trainer.model().parameters()) after.insert(after.end(), q.value.as<float>(), q.value.as<float>() + q.value.size());
    ASSERT_EQ(before.size(), after.size());
    EXPECT_EQ(std::memcmp(before.data(), after.data(), before.size() * sizeof(float)), 0);
    EXPECT_EQ(trainer.steps_done(), 2);
  });
}

TEST(TrainerTest, MetricsFileHasEveryFieldOfEveryStep) {
  RunFolder folder;
  Recording r;
  const TrainResult result = folder.train("run", {"train.measure_ceiling=true"}, r);
  const std::vector<json> lines = lines_of(folder.run("run") + "/metrics.jsonl");
  ASSERT_EQ(lines[0]["kind"], "header");
  EXPECT_EQ(lines[0]["schema"], 1);
  EXPECT_EQ(lines[0]["world"], 4);
  EXPECT_GT(lines[0]["peak_tflops"].get<double>(), 0);
  EXPECT_EQ(lines[0]["layers"], json::parse(R"([{"layer": 1, "E": 8, "K": 2, "P": 4, "recipe": "fp32"}])"));
  EXPECT_EQ(lines[0]["parameters"], r.headers[0].parameters);
  std::int64_t steps = 0, evals = 0;
  for (const json& line : lines) {
    if (line["kind"] == "eval") ++evals;
    if (line["kind"] != "step") continue;
    EXPECT_EQ(line["step"], ++steps);
    for (const char* key :
         {"loss", "aux_loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "tflops", "mfu", "peak_rss_bytes", "peak_bytes", "predicted_bytes"}) {
      EXPECT_GT(line[key].get<double>(), 0) << key;
    }
    for (const char* phase : {"gate", "router", "plan", "dispatch", "expert_gemm", "combine", "attention", "optimizer"}) {
      EXPECT_GT(line["phase_ms"][phase].get<double>(), 0) << phase;
    }
    EXPECT_EQ(line["tokens"], 8 * 32);
    const json& layer = line["layers"][0];
    EXPECT_EQ(layer["counts"].size(), 8u);
    std::int64_t slots = 0, received = 0;
    for (const json& n : layer["counts"]) slots += n.get<std::int64_t>();
    for (const json& n : layer["rank_slots"]) received += n.get<std::int64_t>();
    EXPECT_EQ(slots, 8 * 32 * 2);  // dropless: every token reaches K experts
    EXPECT_EQ(received, slots);
    EXPECT_GE(layer["max_over_mean"].get<double>(), 1.0);
    EXPECT_GT(line["bytes"]["payload"].get<std::int64_t>(), 0);
    EXPECT_GT(line["bytes"]["dense_probability_row"].get<std::int64_t>(), line["bytes"]["weights"].get<std::int64_t>());
  }
  EXPECT_EQ(steps, 30);
  EXPECT_EQ(evals, 3);
  EXPECT_EQ(lines.back()["kind"], "end");
  EXPECT_EQ(lines.back()["loss"].get<double>(), result.held_out_loss);
  EXPECT_EQ(read_file(folder.run("run") + "/sample.txt"), result.sample + "\n");
}

// A run that was killed wrote steps beyond its last checkpoint; the resumed one writes them again, once.
TEST(TrainerTest, ResumedMetricsHoldEveryStepOnce) {
  RunFolder folder;
  Recording first, rest;
  first.stop_after = 10;
  folder.train("run", {"train.sample_tokens=0"}, first);
  const std::string path = folder.run("run") + "/metrics.jsonl";
  write_file(path, read_file(path) + "{\"kind\":\"step\",\"step\":11,\"loss\":9}\n{\"kind\":\"step\",\"st");
  folder.train("run", {"train.sample_tokens=0"}, rest, true);
  std::int64_t expected = 0, headers = 0;
  for (const json& line : lines_of(path)) {
    if (line["kind"] == "header") ++headers;
    if (line["kind"] != "step") continue;
    EXPECT_EQ(line["step"], ++expected);
    EXPECT_NE(line["loss"], 9);
  }
  EXPECT_EQ(expected, 30);
  EXPECT_EQ(headers, 2);
}

TEST(TrainerTest, GenerationContinuesOnOneRankWhatFourTrained) {
  RunFolder folder;
  Recording r;
  const TrainResult result = folder.train("run", {}, r);
  GenerateOptions options;
  options.prompt = "And ";
  options.tokens = 32;
  EXPECT_EQ(generate(folder.run("run"), options), result.sample);
  options.temperature = 0;
  const std::string greedy = generate(folder.run("run"), options);
  options.seed = 9;
  EXPECT_EQ(generate(folder.run("run"), options), greedy);
  options.temperature = 1;
  EXPECT_NE(generate(folder.run("run"), options), greedy);
  options.prompt = "";
  options.tokens = 3;
  EXPECT_EQ(generate(folder.run("run"), options).size(), 4u);
}

TEST(TrainerTest, TokenFilesTrainAndSampleIds) {
  RunFolder folder;
  std::vector<std::uint16_t> tokens(4000);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint16_t>(i * i % 300);
  write_file(folder / "t.bin", std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
  RunConfig config = folder.config({"model.vocab=300", "train.steps=6", "train.sample_tokens=5", "train.sample_prompt=7 8"});
  config.data.text.clear();
  config.data.bin = folder / "t.bin";
  config.data.dtype = "uint16";
  TrainOptions options;
  options.run_dir = folder.run("bin");
  const TrainResult result = train(config, options);
  EXPECT_THAT(result.sample, testing::StartsWith("7 8 "));
  EXPECT_EQ(std::count(result.sample.begin(), result.sample.end(), ' '), 6);
}

TEST(TrainerTest, LearningRateFollowsWarmUpAndCosine) {
  TrainSettings t;
  t.steps = 101;
  t.warmup_steps = 10;
  t.learning_rate = 1;
  t.min_learning_rate = 0.1;
  EXPECT_DOUBLE_EQ(learning_rate_at(t, 0), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate_at(t, 9), 1);
  EXPECT_DOUBLE_EQ(learning_rate_at(t, 10), 1);
  EXPECT_NEAR(learning_rate_at(t, 55), 0.55, 1e-12);
  EXPECT_DOUBLE_EQ(learning_rate_at(t, 100), 0.1);
  t.warmup_steps = 0;
  EXPECT_DOUBLE_EQ(learning_rate_at(t, 0), 1);
}

TEST(SamplerTest, PicksByProbability) {
  const std::vector<float> logits = {0.0f, std::log(2.0f), -1e9f, std::log(2.0f)};  // probabilities 0.2, 0.4, 0, 0.4
  EXPECT_EQ(pick_token(logits, 1, 0.0), 0);
  EXPECT_EQ(pick_token(logits, 1, 0.199), 0);
  EXPECT_EQ(pick_token(logits, 1, 0.201), 1);
  EXPECT_EQ(pick_token(logits, 1, 0.599), 1);
  EXPECT_EQ(pick_token(logits, 1, 0.601), 3);
  EXPECT_EQ(pick_token(logits, 1, 0.99999), 3);
  EXPECT_EQ(pick_token(logits, 0, 0.99), 1);     // ties: the lower id
  EXPECT_EQ(pick_token(logits, 0.5, 0.112), 1);  // squared: 1/9, 4/9, 0, 4/9
}

}  // namespace
}  // namespace waybill
