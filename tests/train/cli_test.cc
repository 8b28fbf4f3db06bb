// SPDX-License-Identifier: Apache-2.0
// The train and generate commands as a user meets them: exit code, one clear line, and what is left on disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "cli_helper.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;
using test::CliTest;
using test::Outcome;
using test::read_file;
using test::run_shell;
using test::write_file;
using testing::HasSubstr;

TEST_F(CliTest, SelectionsAreShownOnceEachAndUnknownOpsAreRefused) {
  const std::string rest = base_ + "--set train.steps=5 --set train.sample_tokens=0 --quiet --run-dir ";
  const Outcome outcome = run_shell("WB_LOG=select " + rest + (folder_ / "selected"));
  EXPECT_EQ(outcome.code, 0) << outcome.text;
  for (const std::string op : {"select router: ", "select gemm: ", "select activation: "}) {
    const std::size_t first = outcome.text.find(op);
    EXPECT_NE(first, std::string::npos) << op << " is not in:\n" << outcome.text;
    EXPECT_EQ(outcome.text.find(op, first + 1), std::string::npos) << op << " is twice in:\n" << outcome.text;
  }
  const Outcome unknown = run_shell("WB_FORCE=routr:ref " + rest + (folder_ / "forced"));
  EXPECT_EQ(unknown.code, 2) << unknown.text;
  EXPECT_THAT(unknown.text, HasSubstr("WB_FORCE names op 'routr', known are activation, gemm, gemm_activation, quantize, quantize_activated, router"));
}

TEST_F(CliTest, BadInputIsOneLineAndExitCode2) {
  const std::string run_dir = " --run-dir " + (folder_ / "r");
  const std::string waybill = WAYBILL_BINARY;
  expect_refused(waybill + " train " + (folder_ / "none.toml") + run_dir, "none.toml does not exist");
  expect_refused(waybill + " train" + run_dir, "give a config file");
  expect_refused(waybill + " train " + golden_ + run_dir, "no training data");
  expect_refused(base_ + "--text " + (folder_ / "none.txt") + run_dir, "--text: At Most 1 required but received 2");
  expect_refused(waybill + " train " + golden_ + " --text " + (folder_ / "none.txt") + run_dir, "none.txt does not exist");
  expect_refused(base_ + "--set model.seq_len=10000" + run_dir,
                 "text too short: " + folder_.text() + " holds 20000 tokens, seq_len = 10000 needs at least 20002");
  expect_refused(base_ + "--set moe.K=9" + run_dir, "moe.K = 9 exceeds moe.E = 8");
  expect_refused(base_ + "--set moe.E=6 --set router.num_groups=1" + run_dir, "moe.E = 6 is not divisible by P = 4");
  expect_refused(base_ + "--set moe.Q=6" + run_dir, "unknown key moe.Q; did you mean moe.");
  expect_refused(base_ + "--set train.steps=x" + run_dir, "train.steps = \"x\" must be an integer");
  write_file(folder_ / "typo.toml", "[modle]\nH = 3\n");
  expect_refused(waybill + " train " + (folder_ / "typo.toml") + run_dir, "typo.toml:1: unknown section [modle]; did you mean [model]?");
  write_file(folder_ / "t.bin", "abcdefg");
  const std::string bin = waybill + " train " + golden_ + " --set data.bin=" + (folder_ / "t.bin");
  expect_refused(bin + " --set data.dtype=uint16" + run_dir, "7 bytes is not a multiple of the 2 bytes of a uint16 token");
  expect_refused(bin + " --set data.dtype=int8" + run_dir, "dtype int8 is not supported");
  expect_refused(waybill + " generate " + (folder_ / "r"), "does not exist");
  expect_refused(base_ + "--set moe.E=65536 --set moe.F=65536" + run_dir, "GB for weights, gradients and moments alone");
  // Layers of different shapes: one of them is too large.
  write_file(folder_ / "uneven.toml", read_file(golden_) + "\n[[layers]]\nindex = 1\nmoe.E = 65536\nmoe.F = 65536\nP = 2\n");
  expect_refused(waybill + " train " + (folder_ / "uneven.toml") + " --set model.num_layers=3 --text " + folder_.text() + run_dir,
                 "GB for weights, gradients and moments alone");
  expect_refused(base_ + "--set model.output_gate=true --set model.full_attention_interval=2" + run_dir,
                 "this engine does not train model.output_gate = true, model.full_attention_interval = 2; `waybill inspect model` gives");
}

// With kernels in the program, GPU or not.
TEST_F(CliTest, InspectMemorySaysHowSmallARunOnAGpuCanBe) {
  const std::string command = std::string(WAYBILL_BINARY) + " inspect memory " + WAYBILL_CONFIG_DIR + "/demo.toml";
  const Outcome json = run_shell(command + " --json"), text = run_shell(command);
  ASSERT_EQ(json.code, 0) << json.text;
  if (json.text.find("built without CUDA") != std::string::npos) GTEST_SKIP() << "needs a program with CUDA";
  const auto number = [&](const std::string& key) {
    return std::stoll(json.text.substr(json.text.find(':', json.text.find("\"" + key + "\"", json.text.find("\"gpu\""))) + 1));
  };
  EXPECT_GT(number("least_total"), 0);
  EXPECT_LT(number("least_total"), number("total"));
  EXPECT_THAT(text.text, HasSubstr("where that does not fit, MoE layers send rows again and work in blocks of columns"));
}

TEST_F(CliTest, AFailedMetricsWriteLeavesNoHalfLine) {
  const std::string run = folder_ / "run";
  // The header line fits into 1 KB, step lines do not.
  const Outcome outcome = run_shell("bash -c 'ulimit -f 2; " + base_ + "--set train.steps=10 --quiet --run-dir " + run + "'");
  EXPECT_EQ(outcome.code, 2) << outcome.text;
  EXPECT_THAT(outcome.text, HasSubstr("cannot write"));
  const std::string metrics = read_file(run + "/metrics.jsonl");
  EXPECT_TRUE(metrics.empty() || metrics.back() == '\n') << metrics;
}

TEST_F(CliTest, TrainsResumesAndGenerates) {
  const std::string run = folder_ / "run";
  const Outcome trained = run_shell(base_ + "--set train.steps=10 --run-dir " + run);
  ASSERT_EQ(trained.code, 0) << trained.text;
  for (const char* part : {"step", "loss", "tokens/s", "router dispatch experts combine", "hottest expert", "rank imbalance", "held-out loss",
                           "unigram entropy", "bigram entropy", "goal", "--- sample ---", "run folder: "}) {
    EXPECT_THAT(trained.text, HasSubstr(part));
  }
  for (const char* name : {"config.toml", "metrics.jsonl", "sample.txt", "checkpoints/latest"}) EXPECT_TRUE(fs::exists(run + "/" + name)) << name;
  const std::string waybill = WAYBILL_BINARY;
  Outcome again = run_shell(waybill + " train --resume " + run + " --set train.steps=12 --quiet");
  EXPECT_EQ(again.code, 0) << again.text;
  EXPECT_THAT(again.text, HasSubstr("trained 12 steps"));
  again = run_shell(waybill + " train --resume " + run + " --set parallel.P=2");
  EXPECT_EQ(again.code, 2);
  EXPECT_THAT(again.text, HasSubstr("P = 4, D = 1, the config says P = 2"));
  again = run_shell(waybill + " train --resume " + run + " --set parallel.P=2 --set train.steps=13 --reshard --quiet");
  EXPECT_EQ(again.code, 0) << again.text;
  const Outcome checked = run_shell(waybill + " inspect checkpoint " + run);
  EXPECT_EQ(checked.code, 0) << checked.text;
  EXPECT_THAT(checked.text, testing::AllOf(HasSubstr("step_00000013: step 13, "), HasSubstr("P = 2"), HasSubstr("every checksum is right")));
  const Outcome text = run_shell(waybill + " generate " + run + " --prompt 'the token' --tokens 8");
  EXPECT_EQ(text.code, 0);
  EXPECT_THAT(text.text, testing::StartsWith("the token"));
  EXPECT_EQ(text.text.size(), 9u + 8u + 1u);
}

TEST_F(CliTest, DamagedCheckpointIsOneLineAndExitCode2) {
  const std::string run = folder_ / "run", waybill = WAYBILL_BINARY;
  ASSERT_EQ(run_shell(base_ + "--set train.steps=10 --quiet --run-dir " + run).code, 0);
  const std::string data = run + "/checkpoints/step_00000010/data_0002.bin", good = read_file(data);
  const std::string resume = waybill + " train --resume " + run + " --set train.steps=12";
  std::string bad = good;
  bad[bad.size() / 2] = static_cast<char>(bad[bad.size() / 2] ^ 4);
  for (const auto& [bytes, part] : {std::pair<std::string, std::string>{bad, "is corrupt: checksum"}, {good.substr(1), "bytes"}}) {
    write_file(data, bytes);
    for (const std::string& command : {resume, waybill + " generate " + run, waybill + " inspect checkpoint " + run}) {
      const Outcome outcome = run_shell(command);
      EXPECT_EQ(outcome.code, 2) << outcome.text;
      EXPECT_THAT(outcome.text, testing::AllOf(HasSubstr("data_0002.bin"), HasSubstr(part)));
      EXPECT_EQ(std::count(outcome.text.begin(), outcome.text.end(), '\n'), 1) << outcome.text;
    }
  }
}

TEST_F(CliTest, AFullDiskKeepsTheLastCheckpoint) {
  const std::string run = folder_ / "run";
  ASSERT_EQ(run_shell(base_ + "--set train.steps=10 --quiet --run-dir " + run).code, 0);
  // A file size limit stands for a full disk: writes fail beyond 40 KB.
  const Outcome outcome = run_shell("bash -c 'ulimit -f 40; " + std::string(WAYBILL_BINARY) + " train --resume " + run + " --set train.steps=12 --quiet'");
  EXPECT_EQ(outcome.code, 2) << outcome.text;
  EXPECT_THAT(outcome.text, testing::AllOf(HasSubstr("cannot write"), HasSubstr("bytes to"), HasSubstr("File too large")));
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(run + "/checkpoints")) names.push_back(entry.path().filename().string());
  EXPECT_THAT(names, testing::UnorderedElementsAre("latest", "step_00000010"));
  EXPECT_EQ(run_shell(std::string(WAYBILL_BINARY) + " train --resume " + run + " --set train.steps=12 --quiet").code, 0);
}

TEST_F(CliTest, SignalsSaveAndExitCleanly) {
  for (const auto& [signal, code] : {std::pair<int, int>{SIGINT, 130}, {SIGTERM, 143}}) {
    SCOPED_TRACE(signal);
    const std::string run = folder_ / fmt::format("run{}", signal);
    const pid_t child = fork();
    if (child == 0) {
      if (std::freopen("/dev/null", "w", stdout) == nullptr) _exit(9);
      execl(WAYBILL_BINARY, WAYBILL_BINARY, "train", golden_.c_str(), "--text", folder_.text().c_str(), "--set", "train.steps=1000000", "--set",
            "train.checkpoint_every=0", "--run-dir", run.c_str(), nullptr);
      _exit(9);
    }
    for (int i = 0; i < 3000 && (!fs::exists(run + "/metrics.jsonl") || fs::file_size(run + "/metrics.jsonl") < 5000); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    kill(child, signal);
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), code);
    EXPECT_TRUE(fs::exists(run + "/checkpoints/latest"));
  }
}

}  // namespace
}  // namespace waybill
