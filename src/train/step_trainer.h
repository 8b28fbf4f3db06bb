// SPDX-License-Identifier: Apache-2.0
// What the training loop drives: one rank of a world on the CPU (RankTrainer), or all ranks of a run on GPUs (src/train/cuda).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/checkpoint.h"
#include "waybill/data.h"
#include "waybill/language_model.h"
#include "waybill/metrics.h"
#include "waybill/optimizer.h"
#include "waybill/random.h"
#include "waybill/train_config.h"

namespace waybill {

// The seed of a step's random numbers under recipes that round stochastically; the same whatever the device.
inline std::uint64_t rounding_seed_of_step(std::uint64_t run_seed, std::int64_t step) {
  constexpr std::uint64_t kRoundingStream = 0x726f756e64696e67ull;
  return random_u64(run_seed + kRoundingStream, static_cast<std::uint64_t>(step));
}

class StepTrainer {
 public:
  virtual ~StepTrainer() = default;

  // Computes update number `step` (0 for the first), or queues it. Returns the metrics of the steps that are known by now, in order; each step's once.
  virtual std::vector<StepMetrics> advance(const Dataset& data, std::int64_t step) = 0;
  // Waits for what was queued; the metrics that are left.
  virtual std::vector<StepMetrics> settle() { return {}; }
  // Mean held-out loss over `count` sequences (0 or too many: all of them). A batch whose receive budget overflowed is computed again with
  // a larger one, which stays. With nothing queued, as the rest.
  virtual double evaluate(const Dataset& data, std::int64_t count) = 0;
  // Saves the routes of every MoE layer and micro-batch at the first step and at every `every`-th: see TrainOptions.
  virtual void record_routes(const std::string& run_dir, std::int64_t every) = 0;
  // Every weight is a number, on every rank. Collective.
  virtual bool is_finite() = 0;
  virtual std::string save(const std::string& folder) = 0;
  virtual void load(const std::string& path) = 0;

  std::int64_t steps_done() const { return info().step; }  // queued ones included
  virtual const CheckpointInfo& info() const = 0;
  virtual LanguageModel& model() = 0;  // on the CPU, with the weights of now: samples are drawn from it
  virtual std::string device() const { return "cpu"; }
  // Parameters of the whole model, each once; `active`: those one token uses.
  virtual std::int64_t num_parameters(bool active) = 0;
};

// Pieces that both kinds share.
CheckpointInfo initial_info(const RunConfig& config);
std::vector<CheckpointTensor> checkpoint_tensors(std::span<const Parameter> parameters, std::span<const OptimizerState> states, std::span<const Tensor> loads,
                                                 std::span<const std::int64_t> load_layers);
bool all_finite(std::span<const Parameter> parameters);
std::int64_t count_parameters(const ModelConfig& config, std::span<const Parameter> parameters, bool active);
LayerMetrics layer_metrics(const MoeLayerStats& stats);

}  // namespace waybill
