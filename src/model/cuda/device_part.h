// SPDX-License-Identifier: Apache-2.0
// What one GPU computes of the model: its ranks' tokens through every layer. The dense parts see the tokens of all of its ranks as one batch and their
// parameters exist once a GPU; the MoE layers see the ranks one by one, an expert-parallel group of them at a time. Every call queues on the GPU's stream and
// returns.
//
// Types: the residual stream, its gradient and attention are fp32; operands of matmuls are bf16 (the copies of the parameters, activations and
// gradients rounded once), sums and results fp32. What is kept for backward: src/model/attention_block.h and feed_forward.h, with h of dense layers in bf16.
#pragma once

#include <memory>
#include <vector>

#include "core/cuda/pinned_buffer.h"
#include "model/batch.h"
#include "model/cuda/device_parameters.h"
#include "model/cuda/step_record.h"
#include "moe/cuda/device_moe.h"
#include "waybill/language_model.h"

namespace waybill::cuda {

inline constexpr std::int64_t kLogitElements = std::int64_t{1} << 25;  // logits that exist at a time: 128 MB

struct DeviceLayerSaved {
  DeviceBuffer x, x_mid;                                             // [T, H]
  DeviceBuffer q, k, v, q_raw, k_raw, o, lse, rstd, q_rstd, k_rstd;  // attention
  DeviceBuffer ff_rstd, h;                                           // feed-forward; h bf16 [T, 2F], dense only
};

class DevicePart {
 public:
  // B: sequences of a micro-batch on a rank, always that many. inputs_in_flight: micro-batches whose tokens may be on their way.
  DevicePart(const ModelConfig& config, const model::ParameterList& list, const DeviceShare& share, std::int64_t B, int inputs_in_flight);

  // The ranks of a group on this GPU, and its windows.
  struct Launch {
    LocalRanks ranks;
    BookWindow book;
  };
  // MoE layers for these budgets; launches: [MoE layer][group that has ranks here]. The former ones go. Waits.
  void make_experts(const std::vector<MoeConfig>& configs, const std::vector<DeviceMoeOptions>& forms, const std::vector<std::vector<Launch>>& launches);
  void drop_experts() { experts_.clear(); }

  // A micro-batch: tokens of this GPU's ranks. The host memory is free again when `inputs_in_flight` further batches have been loaded.
  void load(std::span<const model::TokenBatch> ranks);
  void begin_step();  // the record and the replicated gradients become 0
  void embed();
  void attend(std::size_t layer);
  struct Forward {
    bool training = true;
    double loss_tokens = 0, loss_sequences = 0;  // of the global batch
    double valid_tokens = 0;                     // of this micro-batch, all ranks
    double accumulated_tokens = 0;               // of the step's micro-batches before it
    std::int64_t token_offset = 0;
    bool padding = false;                          // some rank of the world has padding
    bool weights_unchanged = false;                // since the last forward
    std::uint64_t step_seed = 0, micro_batch = 0;  // of the recipe's random numbers
  };
  void feed_forward(std::size_t layer, const Forward& options);
  // Where other groups' tokens count in the losses: counts() of all groups, on whatever GPU, to sum_counts(); all GPUs meet before and after it.
  bool sums_counts(std::size_t layer, const Forward& options) const;
  void add_counts_of_groups(std::size_t layer, std::vector<const std::int32_t*>& counts) const;
  void sum_counts(std::size_t layer, const std::vector<const std::int32_t*>& counts);
  void feed_forward_end(std::size_t layer, const Forward& options);
  void loss(float scale, bool gradient);  // adds to the record's loss; with `gradient` leaves that of the last hidden state
  void feed_forward_backward(std::size_t layer, bool first_micro_batch);
  void attend_backward(std::size_t layer);
  void embed_backward();
  void sum_rank_gradients();  // of what each rank has its own gradient of: gates, shared experts, latent projections

  const DeviceShare& share() const { return share_; }
  cudaStream_t stream() const { return stream_; }
  DeviceParameters& parameters() { return parameters_; }
  const RecordLayout& layout() const { return layout_; }
  RecordHeader* header() const { return record_.as<RecordHeader>(); }
  const DeviceBuffer& record() const { return record_; }
  const std::int64_t* counts(std::size_t moe_layer) const {
    return reinterpret_cast<const std::int64_t*>(record_.as<unsigned char>() + layout_.counts[moe_layer]);
  }
  UpdateState* update_state() const { return update_state_.as<UpdateState>(); }
  DeviceMoeLayer& experts(std::size_t moe_layer, std::size_t group = 0) { return *experts_[moe_layer].groups[group].layer; }
  std::size_t num_groups(std::size_t moe_layer) const { return experts_[moe_layer].groups.size(); }
  std::size_t num_moe_layers() const { return layout_.counts.size(); }

  // Called before work of a phase is queued.
  std::function<void(Phase, cudaStream_t)> on_phase;

 private:
  // A layer of one expert-parallel group's ranks here.
  struct Group {
    std::unique_ptr<DeviceMoeLayer> layer;
    DeviceMoeStep step;
  };
  struct Experts {
    std::vector<Group> groups;
    int P = 1;                 // ranks of a group, on whatever GPU
    int ranks = 1;             // of each on this one
    DeviceBuffer accumulated;  // i32 [E]: what the global loss counted in the step's micro-batches so far; where there is such a loss
    DeviceBuffer counts;       // i32 [num_counts()]: of all groups; where there are several and losses
  };
  // A gradient that each rank has its own of, [num_ranks, size].
  struct RankGradient {
    int parameter;
    std::int64_t size;
    DeviceBuffer memory;
    bool is_added;  // even by the first backward pass of a step: see feed_forward_backward()
  };
  void allocate_layers();
  void allocate_scratch();
  void mark(Phase phase) const {
    if (on_phase) on_phase(phase, stream_);
  }
  DeviceBuffer floats(std::int64_t count) const { return DeviceBuffer(static_cast<std::size_t>(count) * 4, share_.device); }
  DeviceBuffer halves(std::int64_t count) const { return DeviceBuffer(static_cast<std::size_t>(count) * 2, share_.device); }
  TensorView rank_rows(void* data, DType dtype, int rank) const;  // [T of a rank, H] of a [T, H] tensor

  // y [rows, N] (+)= x [rows, C] w^T;  dx [rows, C] (+)= dy w;  dw += dy^T x. x, w, dy bf16.
  void project(const void* x, int weight, std::int64_t N, std::int64_t C, void* y, DType y_dtype, bool accumulate) const;
  void project_back(const void* dy, int weight, std::int64_t N, std::int64_t C, void* dx, DType dx_dtype, bool accumulate) const;
  void weight_gradient(const void* dy, const void* x, int weight, std::int64_t N, std::int64_t C) const;
  void norm(const float* x, int weight, std::int64_t rows, std::int64_t width, void* y, bool y_is_bf16, float* rstd) const;
  void norm_back(const float* x, int weight, const float* rstd, const float* dy, float* dx, bool accumulate, std::int64_t rows, std::int64_t width) const;
  void to_bf16(const float* x, const DeviceBuffer& y, std::int64_t count) const;
  void rotate(const DeviceBuffer& x, std::int64_t heads, bool inverse) const;

  void dense_forward(std::size_t layer);
  void dense_backward(std::size_t layer);
  // What one forward of `layer` by group `group` is given; `padding` and `accumulated` hold what it points to.
  DeviceMoeForward moe_forward(std::size_t layer, std::size_t group, const Forward& options, std::vector<TensorView>& padding,
                               std::vector<TensorView>& accumulated) const;
  std::vector<MoeTensors> moe_values(std::size_t layer) const;
  std::vector<MoeTensors> moe_gradients(std::size_t layer) const;
  void* rank_gradient(int parameter, int rank) const;
  void collect(std::size_t moe_layer);

  const ModelConfig& config_;
  const model::ParameterList& list_;
  DeviceShare share_;
  CudaStream stream_;
  std::int64_t B_, T_;  // sequences and tokens of all of this GPU's ranks
  DeviceParameters parameters_;
  std::vector<std::size_t> moe_index_;  // by layer
  std::vector<Experts> experts_;        // by MoE layer
  std::vector<RankGradient> rank_gradients_;
  RecordLayout layout_;
  DeviceBuffer record_, update_state_;

  DeviceBuffer inputs_, targets_, padding_;  // [T]
  PinnedBuffer staging_;
  int next_staging_ = 0, num_staging_;
  DeviceBuffer cos_, sin_;
  std::vector<DeviceLayerSaved> saved_;
  DeviceBuffer x_out_, final_rstd_;
  // Scratch; the names are those of the CPU's blocks, bf16 where it says so.
  DeviceBuffer normed_, d_bf16_, out_;                              // bf16, bf16, f32 [T, H]
  DeviceBuffer d_, d_normed_;                                       // f32 [T, H]
  DeviceBuffer o_bf16_, d_o_, dq_, dk_, dv_, d_head_bf16_, delta_;  // attention
  DeviceBuffer a_, da_, dh_;                                        // dense, bf16
  DeviceBuffer partial_;                                            // of norm weights' gradients
  DeviceBuffer logits_, d_logits_, losses_;
  std::int64_t logit_rows_ = 0;
};

}  // namespace waybill::cuda
