// SPDX-License-Identifier: Apache-2.0
// What keeps a run folder whole: one process at a time, and no checkpoint of a state that is not a number.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <limits>

#include "error_text.h"
#include "run_helper.h"
#include "train/rank_trainer.h"
#include "train/run_folder.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;
using test::error_text;
using test::read_file;
using test::Recording;
using test::RunFolder;
using test::TempFolder;
using test::write_file;
using testing::HasSubstr;

// A process that holds the lock until it is told to end.
class Holder {
 public:
  explicit Holder(const std::string& folder) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) {
      const RunLock lock(folder);
      if (write(ready[1], "x", 1) == 1) pause();
      _exit(0);
    }
    char byte;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
  }
  ~Holder() { end(); }
  void end() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
};

TEST(RunLockTest, ASecondProcessIsRefusedAndAKilledOneLocksNothing) {
  TempFolder folder;
  Holder holder(folder.str());
  EXPECT_THAT(error_text([&] { RunLock second(folder.str()); }),
              testing::AllOf(HasSubstr("run folder " + folder.str() + " is in use by process " + std::to_string(holder.pid())), HasSubstr(" on host ")));
  holder.end();
  ASSERT_TRUE(fs::exists(lock_path(folder.str())));  // the file stayed, the lock did not
  {
    const RunLock third(folder.str());
    EXPECT_EQ(read_file(lock_path(folder.str())).find(fmt::format("process {} on host ", getpid())), 0u);
    EXPECT_THAT(error_text([&] { RunLock fourth(folder.str()); }), HasSubstr("is in use by process " + std::to_string(getpid())));
  }
  EXPECT_TRUE(fs::is_empty(folder.str()));
}

TEST(RunLockTest, TheHoldersNameIsPrintableWhateverTheFileHolds) {
  TempFolder folder;
  write_file(lock_path(folder.str()), "\x1b[2Jprocess\t7\x7f\nmore");
  const int holder = open(lock_path(folder.str()).c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(flock(holder, LOCK_EX | LOCK_NB), 0);
  EXPECT_THAT(error_text([&] { RunLock second(folder.str()); }), HasSubstr("is in use by ?[2Jprocess?7?; wait for it"));
  close(holder);
}

TEST(RunLockTest, ARunFolderInUseIsNeitherResumedNorFilled) {
  RunFolder folder;
  Recording r;
  folder.train("run", {"train.steps=5", "train.sample_tokens=0"}, r);
  EXPECT_FALSE(fs::exists(lock_path(folder.run("run"))));
  const std::string metrics = read_file(folder.run("run") + "/metrics.jsonl");
  fs::create_directory(folder.run("new"));
  {
    Holder first(folder.run("run")), second(folder.run("new"));
    EXPECT_THAT(error_text([&] { folder.train("run", {"train.steps=6"}, r, true); }), HasSubstr("is in use by process " + std::to_string(first.pid())));
    EXPECT_THAT(error_text([&] { folder.train("new", {"train.steps=6"}, r); }), HasSubstr("is in use by process " + std::to_string(second.pid())));
  }
  EXPECT_EQ(read_file(folder.run("run") + "/metrics.jsonl"), metrics);
  // What a killed process leaves in an otherwise empty folder is in nobody's way.
  ASSERT_TRUE(fs::exists(lock_path(folder.run("new"))));
  folder.train("new", {"train.steps=5", "train.sample_tokens=0"}, r);
  folder.train("run", {"train.steps=6", "train.sample_tokens=0"}, r, true);
}

// Damaged lines of the metrics are in no resume's way, whatever they hold.
TEST(RunLockTest, AResumeDropsMetricsThatAreNoRecords) {
  RunFolder folder;
  Recording r;
  folder.train("run", {"train.steps=5", "train.sample_tokens=0"}, r);
  const std::string metrics = folder.run("run") + "/metrics.jsonl", good = read_file(metrics);
  write_file(metrics, good + R"({"kind":7})" + "\n" + R"({"kind":"step","step":"x"})" + "\n" + R"({"kind":"step","step":1e300})" + "\n[1]\n{\"ki");
  folder.train("run", {"train.steps=6", "train.sample_tokens=0"}, r, true);
  const std::string resumed = read_file(metrics);
  for (const char* part : {R"("step":"x")", "1e300", "[1]", "{\"ki\n"}) EXPECT_THAT(resumed, testing::Not(HasSubstr(part)));
  EXPECT_THAT(resumed, HasSubstr("\"step\":6"));
}

// Overwrites every weight in the newest checkpoint of a run.
void poison(const RunFolder& folder, const std::string& run, float value) {
  const RunConfig config = folder.config({"parallel.P=1", "train.sample_tokens=0"});
  const auto world = make_single_fabric();
  ThreadPool pool(1);
  RankTrainer trainer(config, *world, &pool);
  const std::string checkpoints = checkpoint_folder(folder.run(run));
  trainer.load(latest_checkpoint(checkpoints));
  for (Parameter& p : trainer.model().parameters()) {
    std::fill_n(p.value.as<float>(), p.value.size(), value);
  }
  trainer.save(checkpoints);
}

std::vector<std::string> steps_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class NotFiniteTest : public testing::Test {
 protected:
  void SetUp() override { folder_.train("run", {"parallel.P=1", "train.steps=5", "train.sample_tokens=0"}, r_); }
  std::string resume(std::vector<std::string> overrides) {
    overrides.insert(overrides.end(), {"parallel.P=1", "train.sample_tokens=0"});
    return error_text([&] { folder_.train("run", overrides, r_, true); });
  }
  RunFolder folder_;
  Recording r_;
};

// Weights that are numbers but overflow: the steps are skipped, the run ends, and its weights are saved as they were.
TEST_F(NotFiniteTest, ARunThatIsNotFiniteEndsWithStepAndValues) {
  poison(folder_, "run", 1e30f);
  const std::string text = resume({"train.steps=30", "train.max_skipped=3", "train.checkpoint_every=1"});
  EXPECT_THAT(text, HasSubstr("step 8: loss "));
  EXPECT_THAT(text, HasSubstr("gradient norm nan is not finite, 3 step(s) in a row (train.max_skipped = 3); no step was good; the newest checkpoint is "));
  EXPECT_THAT(text, HasSubstr("step_00000008"));
  EXPECT_THAT(steps_in(checkpoint_folder(folder_.run("run"))), testing::ElementsAre("step_00000005", "step_00000008"));
}

TEST_F(NotFiniteTest, AShortRunWithoutOneGoodStepIsNoSuccess) {
  poison(folder_, "run", 1e30f);
  EXPECT_THAT(
      resume({"train.steps=7"}),
      testing::AllOf(HasSubstr("step 7: loss "), HasSubstr("gradient norm nan is not finite, 2 step(s) in a row (train.max_skipped = 20); no step was good")));
}

TEST_F(NotFiniteTest, WeightsThatAreNotNumbersReplaceNoCheckpoint) {
  poison(folder_, "run", std::numeric_limits<float>::infinity());
  EXPECT_THAT(resume({"train.steps=30", "train.max_skipped=2", "train.checkpoint_every=1"}),
              testing::AllOf(HasSubstr("step 7: loss nan"), HasSubstr("the newest checkpoint is "), HasSubstr("step_00000005")));
  EXPECT_THAT(steps_in(checkpoint_folder(folder_.run("run"))), testing::ElementsAre("step_00000005"));
  EXPECT_THAT(r_.notes, testing::Contains(HasSubstr("step 7: weights are not finite, no checkpoint saved")));
}

TEST_F(NotFiniteTest, ZeroMeansGoOn) {
  poison(folder_, "run", 1e30f);
  EXPECT_EQ(resume({"train.steps=9", "train.max_skipped=0"}), "no error");
  EXPECT_EQ(r_.steps.back().step, 9);
  EXPECT_FALSE(r_.steps.back().valid);
}

}  // namespace
}  // namespace waybill
