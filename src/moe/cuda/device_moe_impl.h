// SPDX-License-Identifier: Apache-2.0
// The layer's state and its steps. forward() and backward() in device_moe_forward.cc and device_moe_backward.cc are the table of contents.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "core/cuda/growable_buffer.h"
#include "core/cuda/pinned_buffer.h"
#include "core/cuda/scratch_buffer.h"
#include "core/cuda/status_device.h"
#include "core/cuda/urgent_stream.h"
#include "moe/cuda/device_moe.h"
#include "moe/cuda/device_moe_layout.h"
#include "moe/cuda/device_moe_recipe.h"
#include "moe/cuda/reduce_counts.h"

namespace waybill::cuda {

// Page-locked host memory that kernels write to.
class PinnedReports {
 public:
  PinnedReports() = default;
  explicit PinnedReports(int count);
  ~PinnedReports();
  PinnedReports(PinnedReports&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  PinnedReports& operator=(PinnedReports&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  DeviceMoeReport* at(int index) const { return data_ + index; }

 private:
  DeviceMoeReport* data_ = nullptr;
};

// What has a row a slot, of one rank, where sizes are exact; buffers that another object has are empty.
struct SlotMemory {
  GrowableBuffer h, a, y, x;
};

struct DeviceMoeStep::Saved {
  DeviceHandle handle;
  std::vector<SlotMemory> slot_memory;  // [ranks of the launch]; the same of what a recompute mode does not keep is the layer's
  std::vector<std::int64_t> slots;      // [ranks of the launch] of the last forward, in expert order
  PinnedBuffer headers;                 // [ranks of the launch] HandleHeader
  std::unique_ptr<CudaEvent> planned;
  std::vector<DeviceBuffer> memory;  // [ranks of the launch], by DeviceMoeStepLayout
  std::uint64_t rows_window = 0;
  PinnedReports reports;
  std::vector<DeviceRoute> routes;  // [ranks of the launch], of the router
  std::vector<DeviceRoute> sent;    // the same as they travel
  std::vector<TensorView> padding_masks;
  std::vector<TensorView> x, d_out;  // [ranks of the launch] of the call that runs, where matmuls read them themselves
  DeviceMoeStepLayout layout{};
  const void* layer = nullptr;
  std::uint32_t reasons = kDenseMapNone;  // of the dense-map path
  bool has_totals = false, has_global = false;
  std::uint64_t weights_version = 0;                                                // of the recipe's copies in this forward; 0: none, or restored
  SeedSource seed;                                                                  // of the recipe's random numbers, for this forward's backward too
  double valid_tokens = 0, loss_tokens = 0, loss_sequences = 0, global_tokens = 0;  // of the losses
  bool awaits_losses = false;                                                       // add_losses() is still to come
  bool ready = false;                                                               // a training forward filled it and no backward has used it

  template <class T>
  T* at(std::size_t index, std::uint64_t offset) const {
    return reinterpret_cast<T*>(memory[index].as<unsigned char>() + offset);
  }
};

struct DeviceMoeLayer::Impl {
  Impl(const MoeConfig& config, const LocalRanks& ranks, int device, const BookWindow& book, const DeviceMoeOptions& options);

  // One call's inputs, handed from step to step.
  struct Forward {
    std::span<const MoeTensors> parameters;
    std::span<const TensorView> x, out;
    DeviceMoeStep::Saved& saved;
    const DeviceMoeForward& options;
    cudaStream_t stream;
  };
  struct Backward {
    std::span<const MoeTensors> parameters, gradients;
    std::span<const TensorView> x, d_out, dx;
    DeviceMoeStep::Saved& saved;
    const DeviceMoeBackward& options;
    cudaStream_t stream;
  };
  using Saved = DeviceMoeStep::Saved;

  std::size_t count() const { return static_cast<std::size_t>(exchange->num_ranks()); }
  void mark(Phase phase, cudaStream_t stream);
  void mark_beside(Phase phase, cudaStream_t stream);
  void fork(cudaStream_t stream, cudaStream_t to) { forked->record(stream), forked->wait_on(to); }
  void join(cudaStream_t stream, cudaStream_t from) { joined->record(from), joined->wait_on(stream); }
  void fork(cudaStream_t stream) { fork(stream, side); }
  void join(cudaStream_t stream) { join(stream, side); }
  static bool adds_to(const TensorView& gradient, const Backward& b) { return b.options.accumulate && gradient.dtype == DType::kF32; }

  // The matmuls of backward find the rows' gradients through the list of the exchange.
  bool lists_gradients() const { return recipe != nullptr || options.policy.gradient == DeviceMoePolicy::Rows::kGather || in_blocks(); }

  // A rehearsal loads the kernels of the losses with all the others.
  bool waits_for_losses(const Forward& f) const {
    return f.options.later_losses && f.options.training && has_losses(config) && !takes_map(f.saved) && !Rehearsal::is_on();
  }
  bool home() const { return is_home(config, {P, options.nodes}); }
  bool blocks_at_home() const { return home() && in_blocks(); }

  // What the shared expert computes without a routed result runs while rows travel: in forward, and under bf16 in backward, too (a recipe's operands of
  // both experts take turns in one scratch).
  bool shared_beside() const { return config.shared_F > 0 && config.overlap_shared; }
  bool shared_gradients_beside() const { return shared_beside() && recipe == nullptr; }

  // device_moe_checks.cc
  void check_forward(const Forward& f) const;
  void check_backward(const Backward& b) const;

  // device_moe_views.cc: tensors of rank i of the launch
  Stream on(cudaStream_t stream) const { return Stream{where, stream, nullptr}; }
  TensorView logits(const Saved& saved, std::size_t i) const;
  TensorView h(const Saved& saved, std::size_t i) const;
  TensorView a(const Saved& saved, std::size_t i) const;
  TensorView y(const Saved& saved, std::size_t i) const;
  TensorView copied_x(const Saved& saved, std::size_t i) const;  // in expert order; where y is, or beside it
  std::int64_t slots(const Saved& saved, std::size_t i) const { return options.exact_sizes ? saved.slots[i] : S; }
  TensorView rows(std::uint64_t window, std::size_t i) const;  // bf16 [R, W] of a row window
  // What the matmuls find through slot_rows(): rows of x, rows of d_out. Their windows, or on one rank the tensors.
  TensorView listed_x(const Saved& saved, std::size_t i) const;
  TensorView listed_d_out(const Saved& saved, std::size_t i) const;
  TensorView listed(const TensorView& own) const;
  TensorView offsets(const Saved& saved, std::size_t i) const;
  TensorView slot_rows(const Saved& saved, std::size_t i) const;
  TensorView slot_weights(const Saved& saved, std::size_t i) const;
  template <class T>
  T* scratch_at(std::size_t i, std::uint64_t offset) const {
    return reinterpret_cast<T*>(scratch[i].as<unsigned char>() + offset);
  }
  RouteView route(const Saved& saved, std::size_t i) const;
  RouterInputs router_inputs(const MoeTensors& parameters, const Saved& saved, std::size_t i) const;
  std::vector<DeviceRows> device_rows(std::span<const TensorView> tensors) const;
  std::vector<DeviceRows> y_rows(const Saved& saved) const;
  std::vector<DeviceRows> copied_x_rows(const Saved& saved) const;
  std::vector<DeviceRows> window_rows(std::uint64_t window) const;
  TensorView shared_h(const Saved& saved, std::size_t i) const;
  TensorView shared_a(const Saved& saved, std::size_t i) const;
  TensorView dense_offsets(const Saved& saved, std::size_t i) const;
  // [T, H], what is added to the routed experts' part: f32 where it is itself a sum, else of the wire's type. In the memory of y, once that is
  // reduced; in that of a, once its gradient is used up.
  TensorView forward_base(const Saved& saved, std::size_t i) const;
  TensorView backward_base(const Saved& saved, std::size_t i) const;
  float* d_logits(const Saved& saved, std::size_t i) const;             // [T, E]: where dh was, or where dh is still needed, where dy was
  TensorView latent_out(const Saved& saved, std::size_t i) const;       // bf16 [T, latent]
  TensorView latent_gradient(const Saved& saved, std::size_t i) const;  // the same
  StatusWord* status_word(std::size_t i) const { return status[i].device_ptr(); }

  // device_moe_sizes.cc: exact sizes
  void make_slot_memory(Saved& saved) const;
  void read_sizes(const Forward& f);  // queues the copy of the plan's sizes
  void take_sizes(const Forward& f);  // waits for it; memory grows
  SlotMemory& slot_owner(Saved& saved, std::size_t i, bool is_kept) { return is_kept ? saved.slot_memory[i] : slot_memory[i]; }
  const SlotMemory& slot_owner(const Saved& saved, std::size_t i, bool is_kept) const { return is_kept ? saved.slot_memory[i] : slot_memory[i]; }
  bool keeps_h() const { return config.recompute <= Recompute::kActivation; }
  bool keeps_a() const { return config.recompute <= Recompute::kNone; }

  // device_moe_prepare.cc
  void prepare(const Forward& f);

  // device_moe_blocks.cc: y in blocks of columns
  struct ColumnBlock {
    std::int64_t first, count;
  };
  bool in_blocks() const { return options.column_blocks > 1; }
  // dW2 and dW1 read copies of the rows of d_out and x, block by block, or all of them through the list: that costs a matmul of short groups less than the
  // copies do (measured).
  bool copies_block_rows() const {
    const DeviceMoePolicy::Rows rows = options.policy.gradient;
    return rows == DeviceMoePolicy::Rows::kPermute || (rows == DeviceMoePolicy::Rows::kAuto && config.T_max * config.K > kShortGroup * L);
  }
  std::vector<ColumnBlock> column_blocks(std::int64_t width) const;
  // out, base: where the block goes at home; else to the partials.
  void reduce_block(const Saved& saved, ColumnBlock block, std::span<const TensorView> out, std::span<const void* const> base, cudaStream_t stream);
  enum class Source : std::uint8_t { kX, kDOut };
  void copy_columns(const Backward& b, Source source, ColumnBlock block, std::span<void* const> copies);
  void second_weight_gradients_in_blocks(const Backward& b);
  void second_matmul_in_blocks(const Forward& f);
  void first_weight_gradients_in_blocks(const Backward& b, std::int64_t width, std::span<void* const> copies);
  void row_gradients_in_blocks(const Backward& b, std::span<const TensorView> out, std::span<const void* const> base);

  // device_moe_forward.cc
  void forward(const Forward& f);
  void choose(const Forward& f);
  void first_of_shared(const Forward& f, cudaStream_t stream);
  void first_matmul(std::span<const MoeTensors> parameters, const Saved& saved, bool keep_h, cudaStream_t stream);
  void second_matmul(const Forward& f);
  void gather_results(const Forward& f);
  void reduce(const Saved& saved, cudaStream_t stream);
  void reduce_and_combine(const Saved& saved, std::span<const TensorView> out, std::span<const void* const> base, cudaStream_t stream, int num_sms = 0);
  void round_rows(const TensorView& from, const TensorView& to, cudaStream_t stream);
  void report(const Forward& f);

  // device_moe_routes.cc: between the router's routes and those that travel
  void set_routes(Saved& saved, std::size_t i, std::int64_t T) const;
  void prepare_routes(const Forward& f);
  void plan(const Forward& f);
  void return_weights(const Backward& b);
  bool takes_map(const Saved& saved) const { return (saved.reasons & kDenseMapCallerMap) != 0; }

  // device_moe_map.cc: the dense-map path
  std::uint32_t dense_reasons(const Forward& f);
  bool has_duplicate_ids(const Forward& f);  // waits; the same on every rank
  void take_map(const Forward& f);
  void plan_map(const Forward& f);

  // device_moe_dense.cc: what every token sees, shared expert and latent projections
  std::vector<DeviceRows> sent_rows(std::span<const MoeTensors> parameters, std::span<const TensorView> x, const Saved& saved, cudaStream_t stream);
  void shared_hidden(std::span<const MoeTensors> parameters, std::span<const TensorView> x, const Saved& saved, bool keep_h, cudaStream_t stream);
  void shared_result(const Forward& f);
  void latent_result(std::span<const MoeTensors> parameters, const Saved& saved, cudaStream_t stream);
  std::vector<DeviceRows> sent_gradients(const Backward& b);
  void shared_weight_gradients(const Backward& b);
  void shared_gradients(const Backward& b);
  void latent_gradients(const Backward& b);

  // device_moe_blocked.cc: the same matmuls under a recipe of blocks
  void make_recipe();
  ExpertSet routed_set(const Saved& saved, std::size_t i) const;
  ExpertSet shared_set(const Saved& saved, std::size_t i) const;
  void quantize_weights(std::span<const MoeTensors> parameters, const Saved& saved, cudaStream_t stream);
  void blocked_first_matmul(std::span<const MoeTensors> parameters, const Saved& saved, bool keep_h, cudaStream_t stream);
  ListedRows sent_x(const Saved& saved, std::size_t i) const;
  void blocked_send(const Backward& b, std::span<const DeviceRows> sent);
  void blocked_second_gradients(const Backward& b);
  void blocked_first_weight_gradients(const Backward& b);
  void blocked_row_gradients(const Backward& b);
  void blocked_shared_hidden(std::span<const TensorView> x, const Saved& saved, bool keep_h, cudaStream_t stream);
  void blocked_shared_result(const Forward& f);
  void blocked_shared_gradients(const Backward& b);

  // device_moe_losses.cc
  void set_totals(const Forward& f);
  void reduce_counts(const Forward& f);
  void sum_nodes(const Forward& f, const ReduceCountsArgs& node);
  void compute_losses(const Forward& f);
  void add_losses(const Forward& f, const std::int32_t* counts);
  // global: of the global loss; where there is no aux loss beside it, it takes that one's place.
  bool only_global() const { return config.global_coefficient != 0 && !has_two_aux_losses(config); }
  RouterLossConfig loss_config(bool global) const;
  RouterLossInputs loss_inputs(const Saved& saved, std::size_t i, bool global) const;

  // device_moe_backward.cc
  void backward(const Backward& b);
  void recompute(const Backward& b);
  void send_to_experts(const Backward& b, std::span<const DeviceRows> sent, cudaStream_t stream);
  void send_beside_shared(const Backward& b, std::span<const DeviceRows> sent);
  void second_matmul_gradients(const Backward& b);
  void copy_x(const Backward& b);
  void first_weight_gradients(const Backward& b);
  void row_gradients(const Backward& b);
  void first_gradients(const Backward& b);
  void first_gradients_in_blocks_at_home(const Backward& b);
  void first_gradients_beside(const Backward& b);
  void bias_gradients(const Backward& b, std::size_t i);  // both; before y is used anew
  bool has_second_bias(std::size_t i) const { return config.expert_bias && ranks.rank[i] % config.expert_tensor_parallel == 0; }
  void router_gradients(const Backward& b);
  void route_gradients(const Backward& b, std::size_t i, const RouterLossConfig& losses, bool global, bool routes, float* d_logits_to);
  void add_loss_gradients(const Backward& b, std::size_t i, bool global);
  void base_gradients(const Backward& b);
  std::vector<TensorView> combined_gradients(const Backward& b) const;
  void rest_of_input_gradients(const Backward& b);
  std::vector<const void*> wire_bases(const Backward& b);

  MoeConfig config;
  DeviceMoeOptions options;
  Device where;
  int P;  // of all nodes; ranks.table.size of them on this one
  int sm_count = 0;
  std::int64_t L, S, R;                               // local experts; slots and rows of the budgets
  std::vector<std::int32_t> rank_table, local_table;  // of expanded ids, with slices of F
  std::unique_ptr<DeviceExchange> exchange;
  DeviceMoeWindows windows;
  std::vector<std::uint64_t> step_windows;  // rows windows not yet given to a step
  std::uint64_t shared_rows_window = 0;     // where steps do not keep rows
  DeviceMoeStepLayout step_parts{};
  DeviceMoeScratchLayout scratch_parts{};
  std::unique_ptr<RecipeMatmuls> recipe;  // of blocks; null: bf16
  std::uint64_t weights_version = 0;      // of its copies of the weights; 0: none yet
  std::vector<DeviceBuffer> scratch;      // [ranks of the launch]
  std::vector<SlotMemory> slot_memory;    // [ranks of the launch], exact sizes
  std::vector<DeviceStatus> status;       // of the router and the matmuls; the exchange has its own
  LocalRanks ranks{};
  bool in_range = false;
  std::map<cudaStream_t, bool> prepared;  // by prepare(); whether with backward
  std::int64_t dense_forwards = 0;
  CudaStream side;      // runs beside the caller's stream between fork() and join()
  UrgentStream beside;  // the same, for a combine or a dispatch that needs few SMs, but these at once
  std::unique_ptr<CudaEvent> forked, joined;
};

}  // namespace waybill::cuda
