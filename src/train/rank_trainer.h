// SPDX-License-Identifier: Apache-2.0
// One rank of a run: model, optimizer state and counters, with the collective steps that the loop is made of.
#pragma once

#include "step_trainer.h"

namespace waybill {

class RankTrainer final : public StepTrainer {
 public:
  RankTrainer(const RunConfig& config, Fabric& world, ThreadPool* pool);

  // Update number `step` (0 for the first). A step whose receive budget overflowed is computed again with a larger one before
  // anything is updated; a step whose gradient is not finite changes nothing. Metrics are complete on every rank.
  StepMetrics step(const Dataset& data, std::int64_t step);
  std::vector<StepMetrics> advance(const Dataset& data, std::int64_t number) override { return {step(data, number)}; }
  double evaluate(const Dataset& data, std::int64_t count) override;
  void record_routes(const std::string& run_dir, std::int64_t every) override;
  bool is_finite() override;
  std::string save(const std::string& folder) override;
  void load(const std::string& path) override;
  const CheckpointInfo& info() const override { return info_; }
  std::int64_t predicted_bytes_ = 0;  // cpu_memory()
  LanguageModel& model() override { return model_; }
  std::int64_t num_parameters(bool active) override { return count_parameters(config_.model, model_.parameters(), active); }

 private:
  StepStats forward_backward(const Dataset& data, std::int64_t step, StepMetrics& metrics);
  void raise_receive_factor(const StatusWord& status, std::int64_t attempt);
  double evaluate_batch(const TensorView& tokens);
  void update(const StepStats& stats, StepMetrics& metrics);
  std::vector<CheckpointTensor> tensors() { return checkpoint_tensors(model_.parameters(), states_, loads_, load_layers_); }

  const RunConfig& config_;
  Fabric& world_;
  ThreadPool* pool_;
  LanguageModel model_;
  std::vector<OptimizerState> states_;
  std::vector<Tensor> micro_batches_;  // [B, seq_len + 1] int32
  std::vector<Tensor> loads_;          // per MoE layer: [E] int64 slots per expert since the start
  std::vector<std::int64_t> load_layers_;
  CheckpointInfo info_;
  std::int64_t updates_ = 0;  // optimizer updates: steps minus skipped ones
  std::int64_t skipped_ = 0;
};

// Fills what is known only over all ranks: phase means, byte sums, imbalances. Collective.
void reduce_metrics(const StepStats& stats, double step_seconds, Fabric& world, StepMetrics& metrics);

}  // namespace waybill
