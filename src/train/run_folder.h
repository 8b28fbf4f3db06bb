// SPDX-License-Identifier: Apache-2.0
// The folder of a run: made once, checked before it is continued.
#pragma once

#include <memory>
#include <string>

#include "run_lock.h"
#include "waybill/checkpoint.h"
#include "waybill/train_config.h"

namespace waybill {

inline std::string config_path(const std::string& run_dir) { return run_dir + "/config.toml"; }
inline std::string metrics_path(const std::string& run_dir) { return run_dir + "/metrics.jsonl"; }
inline std::string checkpoint_folder(const std::string& run_dir) { return run_dir + "/checkpoints"; }
inline std::string sample_path(const std::string& run_dir) { return run_dir + "/sample.txt"; }
// Recorded routes of one MoE layer in one micro-batch; steps count from 1.
std::string route_folder(const std::string& run_dir, std::int64_t step, int layer, std::int64_t micro_batch);

// Makes the folder, locks it and writes config.toml. Refuses a folder that holds anything or that another process has locked.
std::unique_ptr<RunLock> create_run_folder(const std::string& run_dir, const RunConfig& config);
// The lock of a folder to resume; refuses one that does not exist or is in use.
std::unique_ptr<RunLock> lock_run_folder(const std::string& run_dir);
// What a resume starts from; path is empty where the run was stopped before its first checkpoint.
struct ResumePoint {
  std::string path;
  CheckpointInfo info;
};
// Refuses a folder without a run, another model or seed (naming the first line that differs), and another P or D unless `reshard`.
ResumePoint check_resume(const std::string& run_dir, const RunConfig& config, bool reshard);

}  // namespace waybill
