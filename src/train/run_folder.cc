// SPDX-License-Identifier: Apache-2.0
#include "run_folder.h"

#include <filesystem>
#include <sstream>

#include "durable_file.h"
#include "waybill/error.h"

namespace waybill {
namespace {

namespace fs = std::filesystem;

// "[model] H = 64" of the first line that differs; the section is repeated because keys are short.
struct Difference {
  std::string saved, now;
};

Difference first_difference(const std::string& saved, const std::string& now) {
  std::istringstream a(saved), b(now);
  std::string line_a, line_b, section;
  for (;;) {
    const bool more_a = static_cast<bool>(std::getline(a, line_a)), more_b = static_cast<bool>(std::getline(b, line_b));
    if (!more_a && !more_b) return {};
    if (!more_a || !more_b || line_a != line_b) return {section + (more_a ? line_a : "nothing"), section + (more_b ? line_b : "nothing")};
    if (line_a.starts_with('[')) section = line_a + " ";
  }
}

// Nothing but a lock.
bool holds_nothing(const std::string& run_dir) {
  std::error_code error;
  const auto lock_name = fs::path(lock_path(run_dir)).filename();
  for (const auto& entry : fs::directory_iterator(run_dir, error)) {
    if (entry.path().filename() != lock_name) return false;
  }
  if (error) WB_FAIL(ErrorCode::kIo, "cannot read run folder {}: {}", run_dir, error.message());
  return true;
}

}  // namespace

std::string route_folder(const std::string& run_dir, std::int64_t step, int layer, std::int64_t micro_batch) {
  const std::string folder = fmt::format("{}/routes/step_{:08}/layer_{:03}", run_dir, step, layer);
  return micro_batch == 0 ? folder : fmt::format("{}_micro_{:02}", folder, micro_batch);
}

std::unique_ptr<RunLock> create_run_folder(const std::string& run_dir, const RunConfig& config) {
  WB_CHECK(!fs::exists(run_dir) || fs::is_directory(run_dir), "run folder {} exists and is not a folder; give another --run-dir", run_dir);
  WB_CHECK(!fs::exists(run_dir) || holds_nothing(run_dir), "run folder {} exists and is not empty; give another --run-dir, or --resume {} to continue it",
           run_dir, run_dir);
  std::error_code error;
  const bool is_new = fs::create_directories(run_dir, error);
  if (error) WB_FAIL(ErrorCode::kIo, "cannot create run folder {}: {}", run_dir, error.message());
  auto lock = std::make_unique<RunLock>(run_dir);
  // Again, now that nobody else writes: another process may have come and gone in between.
  WB_CHECK(holds_nothing(run_dir), "run folder {} was filled by another process; give another --run-dir", run_dir);
  try {
    replace_file(config_path(run_dir), to_toml(config));
  } catch (...) {
    if (is_new) fs::remove_all(run_dir, error);
    throw;
  }
  return lock;
}

std::unique_ptr<RunLock> lock_run_folder(const std::string& run_dir) {
  if (!fs::is_directory(run_dir)) WB_FAIL(ErrorCode::kIo, "run folder {} does not exist", run_dir);
  return std::make_unique<RunLock>(run_dir);
}

ResumePoint check_resume(const std::string& run_dir, const RunConfig& config, bool reshard) {
  if (!fs::is_directory(run_dir)) WB_FAIL(ErrorCode::kIo, "run folder {} does not exist", run_dir);
  ResumePoint point;
  point.path = latest_checkpoint(checkpoint_folder(run_dir));
  point.info = read_checkpoint_info(point.path);
  const CheckpointInfo& saved = point.info;
  const Difference difference = first_difference(saved.model_config, model_toml(config));
  WB_CHECK(difference.saved == difference.now, "{} holds another model: it was saved with `{}`, the config says `{}`", point.path, difference.saved,
           difference.now);
  WB_CHECK(saved.seed == config.train.seed, "{} was saved with train.seed = {}, the config says {}", point.path, saved.seed, config.train.seed);
  const int D = saved.W / saved.P;
  WB_CHECK(reshard || (saved.P == config.parallel.P && saved.W == config.parallel.W()),
           "{} was saved with P = {}, D = {}, the config says P = {}, D = {}; --reshard resumes at another size", point.path, saved.P, D, config.parallel.P,
           config.parallel.D);
  WB_CHECK(saved.step <= config.train.steps, "{} is at step {}, beyond train.steps = {}", point.path, saved.step, config.train.steps);
  return point;
}

}  // namespace waybill
