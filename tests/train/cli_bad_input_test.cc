// SPDX-License-Identifier: Apache-2.0
// Bad input of every verb: exit code 2 and one line that names the value and what is allowed.
#include <sys/stat.h>
#include <unistd.h>

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

const std::string kWaybill = WAYBILL_BINARY;

TEST_F(CliTest, MisspeltCommandsAndKeysAreSuggested) {
  expect_refused(kWaybill + " trian", "unknown command trian; did you mean train?");
  expect_refused(kWaybill + " inspect rout", "unknown command inspect rout; did you mean inspect route?");
  expect_refused(kWaybill + " xyzzyxyzzy", "unknown command xyzzyxyzzy (--help");
  expect_refused(base_ + "--set E=4", "--set E=4: unknown key E; did you mean moe.E?");
  expect_refused(base_ + "--set stesp=4", "unknown key stesp; did you mean train.steps?");
}

TEST_F(CliTest, NumbersOutOfRangeAreNamed) {
  expect_refused(kWaybill + " generate " + folder_.run("r") + " --seed -1", "--seed: -1 must be an integer of at least 0");
  expect_refused(kWaybill + " generate " + folder_.run("r") + " --seed 1.5", "--seed: 1.5 must be an integer of at least 0");
  for (const std::string option : {"-T", "-E", "-K", "-H", "-F", "-P", "--iterations", "--threads"}) {
    expect_refused(kWaybill + " bench gemm " + option + " 0", "0 must be an integer of at least 1");
    expect_refused(kWaybill + " bench gemm " + option + " -3", "-3 must be an integer of at least 1");
  }
  expect_refused(kWaybill + " bench exchange --seed -1", "-1 must be an integer of at least 0");
  expect_refused(kWaybill + " simulate exchange -P 0", "0 must be an integer of at least 1");
  expect_refused(kWaybill + " simulate exchange -P 8,0", "0 must be an integer of at least 1");
  expect_refused(kWaybill + " inspect load " + folder_.run("r") + " --last -5", "-5 must be an integer of at least 0");
}

TEST_F(CliTest, ARefusedModelIsNotHalfPrinted) {
  expect_refused(kWaybill + " inspect model " + golden_ + " -P 3", "golden: layer 1: E = 8 is not divisible by P = 3");
}

TEST_F(CliTest, ARunNameCannotLeadElsewhere) {
  for (const std::string name : {"../x", "a/b", "", ".hidden", "-x"}) {
    expect_refused(base_ + "--set 'name=\"" + name + "\"'", "must be 1 to 100 letters, digits, '-', '_' or '.', and begin with a letter or digit");
  }
  expect_refused(base_ + "--set name=" + std::string(101, 'a'), "must be 1 to 100 letters");
  EXPECT_FALSE(fs::exists("runs"));
}

TEST_F(CliTest, FoldersAndUnreadableFilesAreNamed) {
  fs::create_directory(folder_ / "d");
  expect_refused(kWaybill + " train " + (folder_ / "d"), "config " + (folder_ / "d") + " is a folder; give a TOML file, or --resume " + (folder_ / "d"));
  expect_refused(kWaybill + " inspect memory " + (folder_ / "d"), "config " + (folder_ / "d") + " is a folder; give a TOML file\n");
  expect_refused(kWaybill + " train /dev/null", "config /dev/null is not a file that can be read");
  expect_refused(kWaybill + " bench gemm --json " + (folder_ / "d"), "--json " + (folder_ / "d") + " cannot be written: it is a folder");
  expect_refused(kWaybill + " bench gemm --json " + (folder_ / "none/a.json"), "none is not a folder");
  expect_refused(kWaybill + " bench router --save-route " + (folder_ / "none/a.route"), "--save-route");
  expect_refused(kWaybill + " train " + golden_ + " --text /dev/zero --run-dir " + (folder_ / "r"), "/dev/zero");
  ASSERT_EQ(mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  expect_refused(kWaybill + " train " + golden_ + " --text " + (folder_ / "pipe") + " --run-dir " + (folder_ / "r"), "it is a pipe, which has no size");
  expect_refused(base_ + "--run-dir " + folder_.text(), folder_.text() + " exists and is not a folder");
  if (geteuid() == 0) return;  // root reads everything
  fs::create_directory(folder_ / "closed");
  chmod((folder_ / "closed").c_str(), 0);
  expect_refused(kWaybill + " train " + golden_ + " --text " + (folder_ / "closed") + " --run-dir " + (folder_ / "r"), "cannot read folder");
  chmod((folder_ / "closed").c_str(), 0755);
}

TEST_F(CliTest, NamesWithControlCharactersStayOnOneLine) {
  for (const std::string command : {"", "train ", "inspect route ", "bench gemm --dtype "})
    expect_refused(kWaybill + " " + command + "'a\nb\033[2J'", "a?b?[2J");
}

TEST_F(CliTest, TwoSourcesOfTokensAreRefusedOrSaid) {
  expect_refused(base_ + "--set data.bin=x.bin --run-dir " + (folder_ / "r"),
                 "--text " + folder_.text() + " and --set data.bin=x.bin name two sources of tokens");
  write_file(folder_ / "bin.toml", read_file(golden_) + "\n[data]\nbin = \"tokens.bin\"\n");
  const Outcome outcome =
      run_shell(kWaybill + " train " + (folder_ / "bin.toml") + " --text " + folder_.text() + " --quiet --set train.steps=5 --run-dir " + (folder_ / "b"));
  EXPECT_EQ(outcome.code, 0) << outcome.text;
  EXPECT_THAT(outcome.text, HasSubstr("takes the place of data.bin = tokens.bin"));
}

TEST_F(CliTest, BatchesThatCannotFitAreRefusedBeforeAnythingIsMade) {
  expect_refused(base_ + "--set train.global_batch=400000000 --run-dir " + (folder_ / "r"), "GB for 50000000 sequences of 32 tokens in a micro-batch");
}

TEST_F(CliTest, TheNameOfARunIsSaidOnce) {
  const Outcome outcome = run_shell(base_ + "--set model.head_dim=7 --run-dir " + (folder_ / "r"));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.text, testing::AllOf(HasSubstr("golden: head_dim 7 must be even"), testing::Not(HasSubstr("golden: golden:"))));
}

// The result did not reach its reader: no success, whatever the verb.
TEST_F(CliTest, AFullStandardOutputIsAnErrorOfEveryVerb) {
  const std::string run = folder_ / "run";
  // Training itself does not end because of its display: the folder is complete.
  const auto full = [](const std::string& command) { return run_shell("{ " + command + " > /dev/full; }"); };
  const Outcome trained = full(base_ + "--set train.steps=5 --run-dir " + run);
  EXPECT_EQ(trained.code, 2) << trained.text;
  EXPECT_TRUE(fs::exists(run + "/checkpoints/step_00000005"));
  const std::string shapes = std::string(WAYBILL_CONFIG_DIR) + "/../bench/shapes";
  for (const std::string& command :
       {kWaybill + " --help", kWaybill + " --version", kWaybill + " train --list-keys", kWaybill + " generate " + run + " --tokens 4",
        kWaybill + " inspect run " + run, kWaybill + " inspect load " + run, kWaybill + " inspect model " + golden_, kWaybill + " simulate exchange",
        kWaybill + " doctor",
        kWaybill + " bench gemm --shapes " + shapes + "/moe.toml --loads " + shapes + "/loads.toml -T 16 --seconds 0.01 --iterations 1 --json -"}) {
    SCOPED_TRACE(command);
    const Outcome outcome = full(command);
    EXPECT_EQ(outcome.code, 2) << outcome.text;
    EXPECT_THAT(outcome.text, testing::StartsWith("waybill: cannot write to standard output"));
    EXPECT_EQ(std::count(outcome.text.begin(), outcome.text.end(), '\n'), 1) << outcome.text;
  }
}

TEST_F(CliTest, DamagedMetricsAreOneLine) {
  fs::create_directory(folder_ / "m");
  for (const auto& [line, part] : {std::pair<std::string, std::string>{R"({"kind":"step","step":1,"loss":1,"layers":[{"layer":"x","counts":[1]}]})", "damaged"},
                                   {R"({"kind":"step","step":1,"loss":1,"layers":[{"layer":0,"counts":7}]})", "instead of a list of counts"},
                                   {R"({"kind":"step","step":1,"loss":1,"layers":[{"layer":0,"counts":[]}]})", "instead of a list of counts"},
                                   {R"({"kind":"step","step":1,"loss":1,"layers":5})", "damaged"},
                                   {R"({"kind":"header","schema":2})", "metrics.jsonl:1: schema 2 of the metrics, this build reads 1"}}) {
    write_file(folder_ / "m/metrics.jsonl", line + "\n");
    expect_refused(kWaybill + " inspect load " + (folder_ / "m"), part);
  }
  for (const std::string line : {R"({"kind":"step"})", R"({"kind":"step","step":1,"loss":1,"phase_ms":{"router":"x"}})"}) {
    write_file(folder_ / "m/metrics.jsonl", line + "\n");
    expect_refused(kWaybill + " inspect run " + (folder_ / "m"), "metrics.jsonl is damaged");
  }
}

}  // namespace
}  // namespace waybill
