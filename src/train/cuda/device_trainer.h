// SPDX-License-Identifier: Apache-2.0
// All ranks of a run on the GPUs of this process, driven by one thread (model/cuda/device_language_model.h). Checkpoints and samples go through a copy of
// the weights on the host, with all experts.
#pragma once

#include <deque>
#include <memory>

#include "model/cuda/device_language_model.h"
#include "train/cuda/phase_timer.h"
#include "train/step_trainer.h"

namespace waybill::cuda {

class DeviceTrainer final : public StepTrainer {
 public:
  DeviceTrainer(const RunConfig& config, Fabric& world, ThreadPool* pool);

  std::vector<StepMetrics> advance(const Dataset& data, std::int64_t step) override;
  std::vector<StepMetrics> settle() override;
  double evaluate(const Dataset& data, std::int64_t count) override;
  void record_routes(const std::string& run_dir, std::int64_t every) override;
  bool is_finite() override;
  std::string save(const std::string& folder) override;
  void load(const std::string& path) override;
  const CheckpointInfo& info() const override { return info_; }
  LanguageModel& model() override;
  std::string device() const override;
  std::int64_t num_parameters(bool active) override { return count_parameters(config_.model, list_.parameters, active); }

  static DeviceModelOptions model_options(const RunConfig& config);  // with the fastest forms of the MoE layers

 private:
  struct Queued {
    std::int64_t step;
    double learning_rate;
    bool is_timed;
  };
  void queue(const Dataset& data, std::int64_t step);
  StepMetrics finish(const DeviceStepResult& result, const Queued& queued);
  void read_row_counters(StepMetrics& newest);
  void note_memory(StepMetrics& newest);
  void add_layers(const DeviceStepResult& result, StepMetrics& metrics) const;
  void raise_receive_factor(const DeviceStepResult& result, std::int64_t attempt);
  DeviceModelOptions options_here() const;  // with those that fit the GPUs
  DeviceLanguageModel::Evaluation evaluate_batch(const std::vector<model::TokenBatch>& ranks);
  void download();
  std::vector<CheckpointTensor> tensors() { return checkpoint_tensors(list_.parameters, states_, loads_, load_layers_); }

  const RunConfig& config_;
  Fabric& world_;
  ThreadPool* pool_;
  ModelConfig one_rank_;  // the model with P = 1: what the host's list and samples see
  model::ParameterList list_;
  std::vector<OptimizerState> states_;
  std::int64_t B_;                        // sequences of a micro-batch on a rank
  std::vector<std::size_t> free_before_;  // device memory of every GPU before the model is made
  DeviceLanguageModel model_;
  std::int64_t peak_bytes_ = 0, predicted_bytes_ = 0;
  std::unique_ptr<LanguageModel> sampling_;
  PhaseTimer timer_;
  std::deque<Queued> queued_;
  std::vector<Tensor> loads_;  // per MoE layer: [E] int64 slots per expert since the start
  std::vector<std::int64_t> load_layers_;
  CheckpointInfo info_;
  std::int64_t updates_ = 0, skipped_ = 0, tokens_per_step_ = 0;
  std::int64_t downloaded_ = -1;  // the step whose weights the host holds
};

// Makes training on GPUs available (train/select_device.h). Once per process, before the first run.
void register_training();

}  // namespace waybill::cuda
