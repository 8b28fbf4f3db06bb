// SPDX-License-Identifier: Apache-2.0
// The library's layer.
#include "bench/cuda/moe/stack.h"
#include "core/cuda/cuda_error.h"
#include "core/cuda/num_sms.h"
#include "moe/cuda/device_moe.h"

namespace waybill::cuda::moe_bench {
namespace {

DeviceMoeOptions layer_options(const StackOptions& options) {
  DeviceMoeOptions o;
  if (options.permute) o.policy.forward = o.policy.gradient = DeviceMoePolicy::Rows::kPermute;
  o.policy.combine_sms = options.combine_sms, o.policy.whole_x = options.whole_x;
  o.column_blocks = options.column_blocks;
  o.exact_sizes = options.exact, o.resend_rows = options.resend;
  return o;
}

MoeConfig config_of(const StackOptions& options, const Problem& problem, double factor) {
  MoeConfig c = problem.layer_config(options.exact ? 0 : factor);
  if (options.exact) c.mode = ExchangeMode::kEager;
  c.recipe.kind = options.recipe;
  return c;
}

class SparseStack final : public Stack {
 public:
  SparseStack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase)
      : problem_(problem), config_(config_of(options, problem, options.receive_factor)), ranks_(problem.on(device)) {
    DeviceMoeOptions o = layer_options(options);
    predicted_ = options.exact ? 0 : sparse_bytes(options, problem, options.receive_factor), backward_.accumulate = options.accumulate;
    keep_weights_ = options.keep_weights;
    o.on_phase = std::move(on_phase);
    layer_ = std::make_unique<DeviceMoeLayer>(
        config_, local_ranks(windows.group, device), device, [&](const std::string& name, std::size_t bytes) { return windows.book(name, bytes); }, o);
    step_ = layer_->make_step();
    for (RankTensors* t : ranks_) {
      weights_.push_back(t->weights), gradients_.push_back(t->gradients);
      x_.push_back(t->x), out_.push_back(t->out), d_out_.push_back(t->d_out), dx_.push_back(t->dx);
      if (t->ids) ids_.push_back(t->ids);
    }
    forward_.replay_ids = ids_;
  }
  void forward(cudaStream_t stream) override {
    layer_->forward(weights_, x_, out_, step_, forward_, stream);
    forward_.weights_unchanged = keep_weights_;
  }
  void backward(cudaStream_t stream) override { layer_->backward(weights_, gradients_, x_, d_out_, dx_, step_, backward_, stream); }
  std::string fault(cudaStream_t stream) override {
    WB_TRY_CUDA(cudaStreamSynchronize(stream));
    for (int i = 0; i < layer_->num_ranks(); ++i) {
      const DeviceMoeReport& report = step_.report(i);
      if (report.valid == 0)
        return fmt::format("rank {}: the step is not valid; slots wanted {}, budget {}", i, report.max_slot_demand, layer_->budget().slots);
      const StatusWord status = layer_->status(i, stream);
      if (status.flags != 0) return fmt::format("rank {}: status flags {:#x}", i, status.flags);
    }
    return {};
  }
  int host_waits() const override { return layer_->host_waits(); }
  std::int64_t computed_rows() const override { return problem_.routes() / problem_.P(); }
  std::size_t predicted_bytes() const override { return predicted_; }
  StepCounts step_counts(cudaStream_t stream) override {
    WB_TRY_CUDA(cudaStreamSynchronize(stream));
    StepCounts sum;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      const double T = static_cast<double>(ranks_[i]->T), S = step_.report(static_cast<int>(i)).slots;
      sum.route_bytes += problem_.P() * T * static_cast<double>(2 * config_.K), sum.weight_bytes += 2 * S * 4;
      sum.slots_visited += 5 * S, sum.scores_visited += T * static_cast<double>(config_.E);
    }
    const auto n = static_cast<double>(ranks_.size());
    return {sum.route_bytes / n, sum.weight_bytes / n, sum.slots_visited / n, sum.scores_visited / n};
  }
  void add_counts(std::vector<std::int64_t>& counts, cudaStream_t stream) override {
    WB_TRY_CUDA(cudaStreamSynchronize(stream));
    std::vector<std::int32_t> mine(static_cast<std::size_t>(config_.E));
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      WB_TRY_CUDA(cudaMemcpy(mine.data(), step_.counts(static_cast<int>(i)), mine.size() * 4, cudaMemcpyDeviceToHost));
      for (std::size_t e = 0; e < mine.size(); ++e) counts[e] += mine[e];
    }
  }

 private:
  Problem& problem_;
  MoeConfig config_;
  std::vector<RankTensors*> ranks_;
  std::size_t predicted_ = 0;
  bool keep_weights_ = false;
  std::unique_ptr<DeviceMoeLayer> layer_;
  DeviceMoeStep step_;
  std::vector<MoeTensors> weights_, gradients_;
  std::vector<TensorView> x_, out_, d_out_, dx_, ids_;
  DeviceMoeForward forward_;
  DeviceMoeBackward backward_;
};

}  // namespace

std::size_t sparse_bytes(const StackOptions& options, Problem& problem, double factor) {
  const std::int64_t slots = options.exact ? problem.hottest_rank_rows() : 0;
  const DeviceMoeMemory m =
      DeviceMoeLayer::memory(config_of(options, problem, factor), problem.P(), layer_options(options), slots, num_sms(problem.devices()[0]));
  return static_cast<std::size_t>(problem.ranks_per_gpu()) * (m.windows + m.scratch + m.step) + m.operations;
}

std::size_t sparse_arena_bytes(const StackOptions& options, Problem& problem) {
  return DeviceMoeLayer::arena_bytes(config_of(options, problem, options.receive_factor), problem.P(), layer_options(options));
}

std::unique_ptr<Stack> make_sparse_stack(const StackOptions& options, Problem& problem, Windows& windows, int device, OnPhase on_phase) {
  return std::make_unique<SparseStack>(options, problem, windows, device, std::move(on_phase));
}

}  // namespace waybill::cuda::moe_bench
