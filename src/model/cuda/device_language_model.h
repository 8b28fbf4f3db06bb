// SPDX-License-Identifier: Apache-2.0
// The language model (waybill/language_model.h) on the GPUs of one process: W virtual ranks over 1 to 8 GPUs, W a multiple of their number. Ranks with equal
// rank / P are an expert-parallel group, P of each layer; groups lie whole on a GPU, or evenly over several. W / P = D replicas of the experts: those of a GPU
// share memory, gradients of those on several are added up.
// A step (forward, backward, reduction, AdamW, router bias) is queued by one host thread without a wait; whether it is applied is decided on the GPUs
// (ops/optimizer/cuda/optimizer_kernels.h). What it came to is read later, from pinned memory.
//
// The host keeps a parameter list with all experts (P = 1), from the same seeds as the CPU model: first values come from it, checkpoints go through it.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "fabric/cuda_local/local_ranks.h"
#include "model/cuda/device_part.h"
#include "waybill/optimizer.h"

namespace waybill::cuda {

struct DeviceModelOptions {
  std::vector<int> devices{0};     // one that is named twice plays two, in turns
  std::int64_t B = 1;              // sequences of a micro-batch on a rank, always that many (padded where fewer)
  std::int64_t micro_batches = 1;  // of a step
  int steps_in_flight = 1;         // most steps that are queued and not yet read
  double receive_factor = 0;       // of every MoE layer; 0 = worst case
  // Bytes of a GPU that the model may take: MoE layers take the fastest forms that fit by the prediction (device_memory.h), or the smallest. Same bits. 0: the
  // fastest.
  std::size_t memory = 0;
};

// A MoE layer of the model as DeviceMoeLayer takes it.
MoeConfig device_moe_config(const ModelConfig& config, const LayerConfig& layer, const DeviceModelOptions& options);

// A step's update, as the trainer decides it beforehand.
struct DeviceUpdate {
  OptimizerConfig optimizer;
  float learning_rate = 0;
  double clip_norm = 0;
  std::uint64_t rounding_seed = 0;  // of the step: see LanguageModel::forward_backward()
};

struct DeviceLayerResult {
  int layer = 0;
  bool overflowed = false;
  std::vector<std::int64_t> counts;                      // [E] over all ranks and micro-batches
  std::vector<RankRecord> ranks;                         // [W]
  std::vector<std::uint64_t> wait_ns;                    // [W, W]: how long rank r waited for rank p in this step
  std::int64_t max_slot_demand = 0, max_row_demand = 0;  // of any rank and micro-batch
  double aux = 0, sequence = 0, global = 0, z = 0;       // over all ranks
};

struct DeviceStepResult {
  UpdateState update{};
  std::int64_t tokens = 0;  // with a loss, of all ranks
  double milliseconds = 0;  // since the end of the step before, or since this one was queued
  std::vector<DeviceLayerResult> layers;
};

class DeviceLanguageModel {
 public:
  using Batches = std::vector<std::vector<model::TokenBatch>>;  // [micro-batch][rank]

  // Throws kUnsupported, by name, what the GPU path lacks: also before any GPU is touched, by check().
  DeviceLanguageModel(const ModelConfig& config, int W, const model::ParameterList& list, const DeviceModelOptions& options);
  ~DeviceLanguageModel();
  static void check(const ModelConfig& config, int W, const DeviceModelOptions& options);

  // Parameters and moments from and to the host's list; updates: optimizer updates done so far. Both wait.
  void upload(std::span<const OptimizerState> states, std::int64_t updates);
  void download(std::span<const OptimizerState> states) const;
  void download_gradients() const;  // of the last step, before clipping

  void queue_step(const Batches& batches, const DeviceUpdate& update);
  std::size_t in_flight() const { return pending_.size(); }
  // Of the oldest step in flight; waits for it.
  DeviceStepResult finish_step();

  // Sum of the losses over the ranks' tokens; changes no parameter. Waits. overflowed: a receive budget did not hold, the loss means nothing.
  struct Evaluation {
    double loss_sum = 0;
    std::int64_t tokens = 0;
    bool overflowed = false;
  };
  Evaluation evaluate(const std::vector<model::TokenBatch>& ranks);

  // New windows of other sizes; with no step in flight. 0 = worst case.
  void set_receive_factor(double factor);
  ReceiveBudget budget(std::size_t moe_layer);
  // The layers' sticky counters (rows that are not finite or short of candidates) since the last call, by MoE layer; waits.
  std::vector<StatusWord> take_status();

  // Called before work of a phase is queued on the first GPU.
  void set_phase_observer(std::function<void(Phase, cudaStream_t)> observer);
  cudaStream_t stream() const;  // of the first GPU

 private:
  struct Pending {
    std::size_t slot;
    std::int64_t tokens;
  };
  std::vector<MoeConfig> moe_configs() const;
  void make_experts();
  void make_groups(const std::vector<std::size_t>& layer_bytes);
  std::vector<std::vector<DevicePart::Launch>> launches_of(const DevicePart& part);
  void sum_over(const std::vector<std::size_t>& devices, std::int64_t begin, std::int64_t end);
  void forward(const std::vector<model::TokenBatch>& ranks, const DevicePart::Forward& options);
  void backward(bool first_micro_batch);
  void reduce();
  void update(const DeviceUpdate& update, double loss_scale);
  void meet_on_one_gpu();  // for tests, which name a GPU twice
  void meet();             // work queued later on any GPU waits for what was queued on all
  void record(std::size_t slot);

  ModelConfig config_;
  const model::ParameterList& list_;
  int W_;
  DeviceModelOptions options_;
  std::vector<std::unique_ptr<DevicePart>> parts_;
  // Of P consecutive ranks; windows_: what its layers booked, in order, the same for each of its GPUs.
  struct RankGroup {
    std::unique_ptr<CudaLocalGroup> ranks;
    std::vector<std::uint64_t> windows;
  };
  std::map<std::pair<int, int>, RankGroup> groups_;  // by P and number
  std::unique_ptr<CudaLocalGroup> world_;            // where no group spans the GPUs: they must reach each other's memory all the same
  std::vector<std::unique_ptr<CudaEvent>> meeting_;
  // By slot and GPU: the record's copy and the event behind it. start_ marks the first step.
  std::vector<std::vector<PinnedBuffer>> slots_;
  std::vector<std::vector<std::unique_ptr<CudaEvent>>> done_;
  CudaEvent start_;
  const CudaEvent* last_end_ = nullptr;
  std::vector<std::vector<std::uint64_t>> waits_before_;  // [MoE layer][W, W] at the end of the newest step that was read
  std::size_t next_slot_ = 0;
  std::deque<Pending> pending_;
};

}  // namespace waybill::cuda
