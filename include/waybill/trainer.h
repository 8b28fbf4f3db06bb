// SPDX-License-Identifier: Apache-2.0
// Trains a model as a run config says: W ranks as threads of this process or as processes, a run folder with config, metrics, checkpoints and sample.
//   RUN/config.toml (resolved)  RUN/metrics.jsonl  RUN/checkpoints/step_*/  RUN/sample.txt
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "waybill/fabric.h"
#include "waybill/metrics.h"
#include "waybill/model_math.h"
#include "waybill/train_config.h"

namespace waybill {

struct TrainOptions {
  std::string run_dir;  // new: must not exist or be empty. resume: continued from its newest checkpoint
  bool resume = false;
  // This process's rank of a world of processes (make_mpi_fabric); null: W ranks as threads of this process. With a world, every rank
  // calls train() with the same config and run_dir, on one file system. Rank 0 writes the folder's files (every rank its part of a
  // checkpoint), calls the observer and has the losses and the sample in its result. The bits are those of W threads.
  Fabric* world = nullptr;
  bool reshard = false;  // allow a resume at another P or D (weights and moments bit-equal, later losses within rounding)
  // RUN/routes/step_00000001/layer_000/rank_000.route ...: every MoE layer's routes, a file a rank of the world, at step 1 and at every
  // multiple of this; 0 = none. Micro-batches after the first stand in layer_000_micro_01 and so on.
  std::int64_t record_routes_every = 0;
  const std::atomic<bool>* stop = nullptr;  // set: the step in work is finished, a checkpoint saved, and train() returns
};

// Called from rank 0's thread, in order. Exceptions end the run.
class WB_API TrainObserver {
 public:
  virtual ~TrainObserver() = default;
  virtual void on_start(const RunHeader&) {}
  virtual void on_step(const StepMetrics&) {}
  virtual void on_eval(std::int64_t /*step*/, double /*loss*/) {}
  virtual void on_checkpoint(std::int64_t /*step*/, const std::string& /*path*/) {}
  virtual void on_note(const std::string& /*text*/) {}  // something worth a line: overflow, skipped update
};

struct TrainResult {
  std::int64_t step = 0;     // updates done
  double train_loss = 0;     // of the last step, nats per token
  double held_out_loss = 0;  // at the end, nats per token
  TextEntropy entropy;       // of the text
  // Text understood beyond pairs: held-out loss below the bigram entropy and at least 0.7 nat below the unigram entropy.
  bool goal_met = false;
  std::string sample;    // prompt and continuation, printable
  bool stopped = false;  // by TrainOptions::stop; no final evaluation or sample then
  double seconds = 0;    // of this call
  std::int64_t reruns = 0, skipped = 0;
};

inline constexpr double kGoalBelowUnigram = 0.7;

WB_API TrainResult train(const RunConfig& config, const TrainOptions& options, TrainObserver* observer = nullptr);

// What a run of this config takes on one rank of a CPU, scratch beside total(): at its receive factor in captured mode, at balanced load in eager; and on one
// GPU (kUnsupported: built without CUDA, or the config is not trained there; no GPU is needed), with the MoE layers as fast or as small as they can be: a run
// takes the fastest form that fits its GPUs.
WB_API MemoryEstimate cpu_memory(const RunConfig& config);
WB_API GpuMemoryEstimate gpu_memory(const RunConfig& config, bool is_smallest = false);

// The largest fp32 matmul rate of this process over all usable cores, TFLOP/s: the ceiling that MFU is given against on a CPU.
WB_API double measure_matmul_ceiling();

struct GenerateOptions {
  std::string prompt = "And ";
  std::int64_t tokens = 300;
  double temperature = 0.8;  // 0 = the likeliest token (ties: the lower id)
  std::uint64_t seed = 1;
};
// Continues `prompt` with the newest checkpoint of a run, on one rank. Byte-level models give printable text, others token ids.
WB_API std::string generate(const std::string& run_dir, const GenerateOptions& options);

// Learning rate of update `step` (0 for the first): linear warm-up to learning_rate, then a cosine to min_learning_rate at the last.
WB_API double learning_rate_at(const TrainSettings& train, std::int64_t step);

}  // namespace waybill
