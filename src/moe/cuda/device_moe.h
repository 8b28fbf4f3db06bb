// SPDX-License-Identifier: Apache-2.0
// The MoE layer on GPUs: the contract of MoeLayer (waybill/moe.h) with device memory, no host wait and fixed budgets. One object serves the ranks
// that one launch stands for, as DeviceExchange does: all virtual ranks of a GPU, or the one rank of a process.
//
// forward() and backward() queue work on `stream` and return; nothing is allocated, registered or waited for, so both can be captured in one graph
// once each has run on that stream (kernels and matmul plans of a shape are made then). Spans hold one element a rank of the launch. What changes
// between replays is the contents of the tensors. All ranks of the group make the same calls in the same order. Results are bit-equal on repeat and
// between eager and captured runs.
//
// Memory: windows are booked in the ranks' arenas by the constructor, scratch is allocated there, what a step keeps by make_step(). Budgets are
// those of ExchangeConfig: receive_factor 0 is the worst case, captured mode's default 1.5. Both modes keep to the budget; neither waits, but for
// DeviceMoeOptions::exact_sizes.
//
// Recipes bf16, fp8, mxfp8, nvfp4. Those of blocks quantise the weights in every forward (see weights_unchanged) and rows as they read them from the
// windows: nothing is rounded on a link. backward() uses the copies of its forward, and makes them again where another forward quantised since.
//
// Types: x, d_out, parameters bf16; out, dx bf16 or f32; gradients of matmul weights bf16 (stored) or f32 (stored or accumulated), of the gate f32;
// router_bias, b1, b2 and their gradients f32. Everything contiguous and aligned to 16 bytes; H, F / expert_tensor_parallel, latent, shared_F multiples
// of 8.
//
// Where compact routes are not legal a forward takes the dense-map path (DenseMapReason), logs why once and counts it: see DeviceMoeOptions::dense_map.
//
// Faults: after an overflow on any rank the step is invalid on every rank: out and dx are 0, gradients keep their values where they are accumulated
// and become 0 where they are stored; DeviceMoeReport says so, and the sticky status word holds demand and capacity. Timeouts: see DeviceExchange.
// Bad arguments throw before anything is queued. What a config asks for and this layer lacks is refused with kUnsupported, by name.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "exchange/cuda/make_exchange.h"
#include "moe/cuda/device_moe_report.h"
#include "waybill/moe.h"

namespace waybill::cuda {

// Speed and memory only, never results. Recipes of blocks read rows through the list whatever it says.
struct DeviceMoePolicy {
  enum class Rows : std::uint8_t { kAuto = 0, kGather = 1, kPermute = 2 };
  Rows forward = Rows::kAuto;   // how the first matmul finds its rows: through a list, or from a copy in expert order
  Rows gradient = Rows::kAuto;  // the same for the matmuls of backward; with column_blocks of dW1 alone
  // SMs of a combine of dx that runs beside the gradient of the first weights, which does not need it; 0: one after the other. The matmul takes these SMs as
  // they get free. Copied rows then take turns in the memory of `a`, in blocks of columns; whole_x: they have a buffer of their own, bf16 [S, row width]. fp8:
  // x along the slots has one, bytes [S, row width]. Without effect with resend_rows, whose rows lie where partials go, with column_blocks, between nodes,
  // whose combine sends over rails, and under fp8 with a shared expert, whose operands take turns with those of dW1.
  int combine_sms = 0;
  bool whole_x = false;
};

struct DeviceMoeOptions {
  // Nodes of the group, whose ranks do not reach each other's memory: P is that of all of them, `ranks` and windows those of one node, and `rail` (of
  // as many nodes; it must outlive the layer) carries rows between them. Then MoeConfig::hierarchy is two_level or auto, and what needs one NVLink domain is
  // refused: slices of F, the dense-map path. The same results as in one domain: to the bit with one rank a node and the partials' sums in rank order; with
  // several, sums are by node and an expert's rows in another order (NodeExchange).
  int nodes = 1;
  Rail* rail = nullptr;
  int num_steps = 1;  // steps in flight (forward without its backward); each books a window for the rows it keeps
  DeviceMoePolicy policy;
  ExchangeTuning exchange;
  // Eager mode at the worst-case budget (receive_factor 0) only: what has a row a slot (h, a and what they become) is as large as the fullest step so far, and
  // grows in place. forward() then waits on the host for its plan, once; it cannot be captured, and GPUs of one process need a host thread each. Windows
  // and the plan keep the worst case (min(P T_max, slots) rows): nothing can overflow. The same bits.
  bool exact_sizes = false;
  // Backward sends the rows of x again instead of keeping them: all steps and directions share one row window (else 1 + num_steps). The same bits.
  bool resend_rows = false;
  // More than 1: results of the second matmul and gradients of rows are made and reduced in so many blocks of columns (of 64 at least), so that the largest
  // buffer, bf16 [S, row width], takes one block. Combine begins when all are reduced; backward reads d_out and x through the list, but for weights' gradients
  // of experts with many rows, which read copies of a block (policy.gradient). For memory, with exact_sizes and resend_rows; bf16 without expert biases. The
  // same bits. 0: by what was measured: two where they take less than 1% longer (one rank at exact sizes, experts with many rows that are wide), else one.
  int column_blocks = 1;
  // Room for the dense-map path: 5 E bytes a token of the group and E floats an own one. Layers whose config always takes that path have it anyway
  // (force_dense_map, pad_to_capacity, K above 128, compact_fabric = false); with it a caller's map and, in eager mode, replayed routes that name an
  // expert twice are taken. Without it a map is refused, and such routes set kStatusDuplicateId.
  bool dense_map = false;
  bool compact_fabric = true;  // false: the ranks' fabric carries no compact exchange
  // Called on the host before work of a phase is queued, and with kOther after the last: benchmarks record events there, profilers get ranges.
  std::function<void(Phase phase, cudaStream_t stream)> on_phase;
};

struct DeviceMoeForward {
  bool training = true;                       // false: no losses, nothing is kept for backward
  std::span<const TensorView> padding_masks;  // u8 [T] a rank, 1 = padding; or empty
  std::span<const TensorView> replay_ids;     // i16 or i32 [T, K] a rank; or empty
  std::int64_t token_offset = 0;              // of row 0 of rank 0; forced balance only
  // For the losses. valid_tokens: of this call over all ranks of the group; 0 = the T of the launch together, where it holds all ranks and no padding
  // mask is given. loss_tokens, loss_sequences: of the global batch; 0 = this call's (with a mask the sequences must be given).
  double valid_tokens = 0, loss_tokens = 0, loss_sequences = 0;
  // Global loss: counts of earlier micro-batches over all ranks, i32 [E] a rank of the launch, and the tokens they cover; or empty.
  std::span<const TensorView> accumulated_counts;
  double accumulated_tokens = 0;
  // The caller's own routing, f32 [T, E] a rank, 0 = not routed, on all ranks or none; see MoeForwardOptions::dense_map. More than K experts a token count
  // against the budget of slots as all else does.
  std::span<const TensorView> dense_maps;
  // Replicas of the experts see other tokens than this group (D > 1), and the losses count over all of them: forward() ends without losses and without its
  // report, and add_losses() must follow before the backward pass. valid_tokens, loss_tokens and loss_sequences are then those of all groups.
  bool later_losses = false;
  // Recipes of blocks: w1, w2 and the shared expert's weights hold what they held in this layer's last forward, whose quantised copies still serve.
  bool weights_unchanged = false;
  // Random numbers of the recipe, for this forward's backward too: see MoeForwardOptions. rounding_seed_device: where that memory (one u64 on this
  // device) is read instead, so that replays of a graph may draw anew.
  std::uint64_t rounding_seed = 0;
  const std::uint64_t* rounding_seed_device = nullptr;
};

struct DeviceMoeBackward {
  bool accumulate = false;  // add to f32 gradients instead of storing; bf16 ones are always stored
  float loss_scale = 1.0f;
  // Device memory, [3] f32: factors of the gradients of the auxiliary (or global), the sequence and the z loss, read when the kernels run; loss_scale
  // must then be 1. Null: 1 each. With both the auxiliary and the global loss [6]: the second three belong to the global loss's call of the router.
  const float* loss_weights = nullptr;
  std::span<const TensorView> d_dense_maps = {};  // f32 [T, E] a rank, written; where the forward was given maps. d_gate gets nothing then
};

// Bytes of one rank.
struct DeviceMoeMemory {
  std::size_t windows = 0;  // in the arena, those of all steps included
  std::size_t scratch = 0;  // of the layer
  std::size_t step = 0;     // of one step, without its window
  // What the matmuls and the gate allocate for a stream at its first step, on a GPU of `num_sms` SMs; other layers on the stream share it.
  std::size_t operations = 0;
  std::size_t total() const { return windows + scratch + step + operations; }
};

// What a forward leaves for its backward: device memory of fixed size. Movable; must not outlive the layer.
class DeviceMoeStep {
 public:
  struct Saved;
  DeviceMoeStep();
  ~DeviceMoeStep();
  DeviceMoeStep(DeviceMoeStep&&) noexcept;
  DeviceMoeStep& operator=(DeviceMoeStep&&) noexcept;

  const DeviceMoeReport& report(int index) const;  // of rank `index` of the launch
  const DeviceHandle& handle() const;              // plan and layout, for reading
  // Device memory of the last forward, of rank `index`: ids and weights [T, K], counts [E] of this rank's tokens.
  DeviceRoute route(int index) const;
  const std::int32_t* counts(int index) const;
  // [num_counts()] counts of all ranks, where losses or bias_update_rate need them, else null: [E], then [E] of AuxCounts::kUnbiased where that is asked for.
  const std::int32_t* total_counts(int index) const;
  // With a global loss: [E] what that loss counted, the accumulated counts of the forward among it; else null.
  const std::int32_t* global_counts(int index) const;
  std::uint32_t dense_map_reasons() const;  // DenseMapReason bits; not none: the last forward took the dense-map path

 private:
  friend class DeviceMoeLayer;
  std::unique_ptr<Saved> saved_;
};

class DeviceMoeLayer {
 public:
  // config.T_max must be given. book: see DeviceExchange; called by every rank of a node in the same order.
  DeviceMoeLayer(const MoeConfig& config, const LocalRanks& ranks, int device, const BookWindow& book, const DeviceMoeOptions& options = {});
  ~DeviceMoeLayer();
  DeviceMoeLayer(const DeviceMoeLayer&) = delete;
  DeviceMoeLayer& operator=(const DeviceMoeLayer&) = delete;

  // What an arena must hold for the windows, and what a rank will use; needs no GPU.
  static std::size_t arena_bytes(const MoeConfig& config, int P, const DeviceMoeOptions& options = {});
  // exact_slots: with exact_sizes, the most slots that a rank gets in one step; 0 = the mean, T_max K (P ranks, L experts each). num_sms: of the GPU that is
  // asked about, by default an H100 SXM or H200.
  static DeviceMoeMemory memory(const MoeConfig& config, int P, const DeviceMoeOptions& options = {}, std::int64_t exact_slots = 0, int num_sms = 132);

  const MoeConfig& config() const;
  ReceiveBudget budget() const;
  DeviceExchange& exchange();
  int num_ranks() const;   // of the launch
  int host_waits() const;  // of a forward and backward pass: 1 with exact_sizes, else 0
  // Training forwards that were queued on the dense-map path; DeviceMoeReport::dense_map_forwards counts replays too.
  std::int64_t num_dense_map_forwards() const;
  // Device memory of rank `index` that has a row a slot, of the layer and of `step`.
  std::size_t slot_bytes(const DeviceMoeStep& step, int index) const;

  DeviceMoeStep make_step();  // allocates; at most num_steps

  // x [T, H], T <= T_max, may differ between ranks and be 0. out [T, H] is written.
  void forward(std::span<const MoeTensors> parameters, std::span<const TensorView> x, std::span<const TensorView> out, DeviceMoeStep& step,
               const DeviceMoeForward& options, cudaStream_t stream);
  // What a training forward with later_losses has left out. counts: device memory, i32 [num_counts()], the total_counts() of all groups added up. options: that
  // forward's.
  void add_losses(std::span<const MoeTensors> parameters, DeviceMoeStep& step, const std::int32_t* counts, const DeviceMoeForward& options,
                  cudaStream_t stream);
  std::int64_t num_counts() const;  // of DeviceMoeStep::total_counts()
  bool adds_losses() const;
  // dx [T, H] is written; gradients as DeviceMoeBackward says. One backward a training forward.
  void backward(std::span<const MoeTensors> parameters, std::span<const MoeTensors> gradients, std::span<const TensorView> x, std::span<const TensorView> d_out,
                std::span<const TensorView> dx, DeviceMoeStep& step, const DeviceMoeBackward& options, cudaStream_t stream);

  // What a training forward leaves for its backward, in memory of the caller's (saved_bytes(), aligned to 16), for launches with one rank: the step may
  // then serve other forwards before the backward runs. Not with exact_sizes or resend_rows. Both queue copies. restore() wants the forward's x and
  // options and makes the step ready.
  static std::size_t saved_bytes(const MoeConfig& config, int P, int nodes = 1);
  void save(const DeviceMoeStep& step, void* to, cudaStream_t stream) const;
  void restore(DeviceMoeStep& step, const void* from, const TensorView& x, const DeviceMoeForward& options, cudaStream_t stream);

  StatusWord status(int index, cudaStream_t stream) const;  // sticky; waits for the stream
  void clear_status(cudaStream_t stream) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace waybill::cuda
