// SPDX-License-Identifier: Apache-2.0
// A kill at any instant, and a disk that is full, leave the last good checkpoint and nothing half-written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>

#include "error_text.h"
#include "temp_folder.h"
#include "train/durable_file.h"
#include "waybill/checkpoint.h"
#include "waybill/random.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;
using test::error_text;
using test::TempFolder;
using testing::HasSubstr;

constexpr std::int64_t kSize = 300000;

// Every value of a step's tensor is the step's number.
void save_step(const std::string& folder, std::int64_t step) {
  auto world = make_single_fabric();
  Tensor w(DType::kF32, {kSize});
  for (std::int64_t i = 0; i < kSize; ++i) w.as<float>()[i] = static_cast<float>(step);
  CheckpointInfo info;
  info.step = step;
  const CheckpointTensor tensors[] = {{"w", w, false, 0, 0}};
  save_checkpoint(folder, info, tensors, *world, 2);
}

std::int64_t load_latest(const std::string& folder) {
  auto world = make_single_fabric();
  Tensor w = Tensor::zeros(DType::kF32, {kSize});
  const CheckpointTensor tensors[] = {{"w", w, false, 0, 0}};
  const std::string path = latest_checkpoint(folder);
  load_checkpoint(path, tensors, *world);
  const std::int64_t step = read_checkpoint_info(path).step;
  for (std::int64_t i = 0; i < kSize; ++i) EXPECT_EQ(w.as<float>()[i], static_cast<float>(step));
  return step;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  return names;
}

const char* g_point = "";
void exit_at_point(const char* point) {
  if (std::strcmp(point, g_point) == 0) _exit(42);
}

TEST(CheckpointKillTest, EndAtEveryPointOfASaveLeavesAGoodStep) {
  for (const char* point : {"data", "index", "rename", "latest"}) {
    SCOPED_TRACE(point);
    TempFolder folder;
    save_step(folder.str(), 1);
    const pid_t child = fork();
    if (child == 0) {
      g_point = point;
      g_save_hook = exit_at_point;
      save_step(folder.str(), 2);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(WEXITSTATUS(status), 42);  // it did end there
    EXPECT_EQ(load_latest(folder.str()), std::strcmp(point, "latest") == 0 ? 2 : 1);
    save_step(folder.str(), 2);  // the next save works and clears what the dead one left
    EXPECT_EQ(load_latest(folder.str()), 2);
    EXPECT_THAT(names_in(folder.str()), testing::UnorderedElementsAre("latest", "step_00000001", "step_00000002"));
  }
}

TEST(CheckpointKillTest, KillAtRandomInstantsLeavesAGoodStep) {
  TempFolder folder;
  save_step(folder.str(), 1);
  std::int64_t last = 1;
  // On a busy machine a child may be killed before its first save is complete: later trials wait longer.
  for (std::uint64_t trial = 0; trial < 12 || (last == 1 && trial < 120); ++trial) {
    SCOPED_TRACE(trial);
    const pid_t child = fork();
    if (child == 0) {
      for (std::int64_t step = last + 1;; ++step) save_step(folder.str(), step);
    }
    std::this_thread::sleep_for(std::chrono::microseconds((2000 + random_u64(1, trial) % 30000) * (1 + trial / 12)));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const std::int64_t step = load_latest(folder.str());
    EXPECT_GE(step, last);
    last = step;
  }
  EXPECT_GT(last, 1);  // some saves did complete
}

// Lowers the largest file this process may write for as long as it lives: a write beyond it fails as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    old_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old_);
    rlimit limit = old_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int) = nullptr;
};

TEST(CheckpointKillTest, AFailedWriteKeepsTheLastGoodStepAndLeavesNothingElse) {
  TempFolder folder;
  save_step(folder.str(), 1);
  std::string text;
  {
    FileSizeLimit limit(100000);
    text = error_text([&] { save_step(folder.str(), 2); });
  }
  EXPECT_THAT(text, HasSubstr("bytes to " + (folder / ".tmp_step_00000002/data_0000.bin")));
  EXPECT_THAT(text, HasSubstr("cannot write"));
  EXPECT_THAT(names_in(folder.str()), testing::UnorderedElementsAre("latest", "step_00000001"));
  EXPECT_EQ(load_latest(folder.str()), 1);
}

TEST(CheckpointKillTest, AFailedWriteOnOneRankFailsEveryRankAlike) {
  TempFolder folder;
  std::vector<std::string> texts(2);
  FileSizeLimit limit(50000);
  run_ranks(2, [&](Fabric& world) {
    // Rank 1 holds the large expert part.
    Tensor small = Tensor::zeros(DType::kF32, {4}), expert = Tensor::zeros(DType::kF32, {1, world.rank() == 1 ? 40000 : 100});
    const CheckpointTensor tensors[] = {{"small", small, false, 0, 0}, {"w", expert, true, world.rank(), 2}};
    texts[static_cast<std::size_t>(world.rank())] = error_text([&] { save_checkpoint(folder.str(), {}, tensors, world, 2); });
  });
  EXPECT_THAT(texts[0], HasSubstr("data_0001.bin"));
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_THAT(names_in(folder.str()), testing::IsEmpty());
}

}  // namespace
}  // namespace waybill
