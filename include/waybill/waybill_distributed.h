/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI, second part: groups of ranks, exchange, the MoE layer and training. Included by waybill.h; the rules are there.
 * "Collective": every rank of the group makes the same calls in the same order, each from a thread of its own.
 */
#ifndef WAYBILL_WAYBILL_DISTRIBUTED_H_
#define WAYBILL_WAYBILL_DISTRIBUTED_H_

#include "waybill/waybill.h"
#include "waybill/waybill_quantize.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- groups of ranks ------------------------------------------------------------------------------------------------- */

typedef struct wb_group wb_group;   /* P ranks in this process (the threads engine) */
typedef struct wb_fabric wb_fabric; /* one rank of a group; owned by its wb_group if it has one, used by one thread at a time */

/* timeout_ms: longest wait for a peer; 0 = the default of 60 s. ranks_per_node: the group plays ceil(P / ranks_per_node) nodes, which
   the two-level exchange respects; 0 = one node. */
WB_API wb_status wb_group_create(int32_t P, int64_t timeout_ms, int32_t ranks_per_node, wb_group** group) WB_NOEXCEPT;
WB_API void wb_group_destroy(wb_group* group) WB_NOEXCEPT;
WB_API wb_status wb_group_fabric(wb_group* group, int32_t rank, wb_fabric** fabric) WB_NOEXCEPT;

/* One rank of a group over the caller's own transport, for example a process group of a framework. */
typedef struct wb_fabric_transport {
  uint64_t struct_size;
  void* user;
  /* send holds send_bytes[p] bytes for rank p, in rank order; receive likewise; own rank: 0 bytes. Every rank calls it in one order, from the
     thread that made the collective call. Returns 0 when the bytes have moved; else the group has failed and `error` (room for error_bytes, with
     the final 0) says why. Limits its own waits. */
  int32_t (*all_to_all)(void* user, const void* send, const int64_t* send_bytes, void* receive, const int64_t* receive_bytes, char* error, int64_t error_bytes);
} wb_fabric_transport;
/* Not collective. The transport must stay usable until wb_fabric_destroy. */
WB_API wb_status wb_fabric_create(const wb_fabric_transport* transport, int32_t P, int32_t rank, int32_t ranks_per_node, wb_fabric** fabric) WB_NOEXCEPT;
WB_API void wb_fabric_destroy(wb_fabric* fabric) WB_NOEXCEPT; /* only what wb_fabric_create made */

/* Wakes every rank that waits for this one with WB_PEER_FAILED and `reason`. Call it when a rank gives up. */
WB_API wb_status wb_fabric_abort(wb_fabric* fabric, const char* reason) WB_NOEXCEPT;
WB_API wb_status wb_fabric_barrier(wb_fabric* fabric) WB_NOEXCEPT; /* collective */
/* Elementwise sum in rank order, in place; bit-equal on every rank. Collective. */
WB_API wb_status wb_fabric_all_reduce_i64(wb_fabric* fabric, int64_t* values, int64_t count) WB_NOEXCEPT;
WB_API wb_status wb_fabric_all_reduce_f32(wb_fabric* fabric, float* values, int64_t count) WB_NOEXCEPT;

/* ---- exchange -------------------------------------------------------------------------------------------------------- */

enum wb_exchange_mode { WB_EAGER = 0, WB_CAPTURED = 1 };
enum wb_combine_wire { WB_WIRE_F32 = 0, WB_WIRE_BF16 = 1 };
/* Rows go once per destination rank; or once per remote node and on from there; or whichever fits the nodes of the group. */
enum wb_hierarchy { WB_FLAT = 0, WB_TWO_LEVEL = 1, WB_HIERARCHY_AUTO = 2 };

typedef struct wb_exchange_config {
  uint64_t struct_size;
  int64_t H, E, K;
  int64_t T_max;         /* most tokens a rank may bring; captured mode must know it */
  int64_t alignment;     /* every expert's rows start at a multiple of it */
  double receive_factor; /* 0 = worst case */
  int32_t mode, combine_wire, debug_checks, hierarchy;
} wb_exchange_config;
WB_API wb_status wb_exchange_config_init(wb_exchange_config* config, uint64_t struct_size) WB_NOEXCEPT;

typedef struct wb_exchange wb_exchange; /* one per rank; keep its group alive */
typedef struct wb_dispatch wb_dispatch; /* plan of one batch and the rows it received */
/* Collective: the ranks compare their configs, a difference is named on every rank. Block placement: E / P experts a rank. */
WB_API wb_status wb_exchange_create(const wb_exchange_config* config, wb_fabric* fabric, wb_exchange** exchange) WB_NOEXCEPT;
WB_API void wb_exchange_destroy(wb_exchange* exchange) WB_NOEXCEPT;

/* Exchanges counts, ids and weights. Collective. */
WB_API wb_status wb_exchange_plan(wb_exchange* exchange, const wb_route* route, wb_dispatch** dispatch) WB_NOEXCEPT;
WB_API void wb_dispatch_destroy(wb_dispatch* dispatch) WB_NOEXCEPT;

/* Borrowed views, alive as long as the wb_dispatch. */
typedef struct wb_dispatch_info {
  uint64_t struct_size;
  int64_t R, S, S_padded, L;
  const int64_t* row_offsets;    /* [P+1] received rows by source rank */
  const int32_t* expert_offsets; /* [L+1] first slot of each local expert */
  const int32_t* expert_counts;  /* [L] slots without padding */
  const int32_t* slot_row;       /* [S_padded] row of a slot, -1 = padding */
  const float* slot_weight;      /* [S_padded] */
  int32_t valid;                 /* 0 after an overflow on any rank */
  int32_t reserved;
} wb_dispatch_info;
WB_API wb_status wb_dispatch_get_info(const wb_dispatch* dispatch, wb_dispatch_info* info) WB_NOEXCEPT;

/* x [T, H] fp32 or bf16 -> rows [R, H] of the same type in memory of the wb_dispatch (valid until its next dispatch). Collective. */
WB_API wb_status wb_exchange_dispatch(wb_exchange* exchange, wb_dispatch* dispatch, const wb_tensor* x, wb_tensor* rows) WB_NOEXCEPT;
/* z [R, H] fp32 -> out [T, H]: sums in rank order. Collective. */
WB_API wb_status wb_exchange_combine(wb_exchange* exchange, const wb_dispatch* dispatch, const wb_tensor* z, const wb_tensor* out) WB_NOEXCEPT;
/* slot_values [S_padded] -> d_weights [T, K]. Collective. */
WB_API wb_status wb_exchange_return_slot_values(wb_exchange* exchange, const wb_dispatch* dispatch, const float* slot_values, float* d_weights) WB_NOEXCEPT;
/* Local steps of the receiver: rows [R, H] -> y [S_padded, H]; z [R, H] = sum over a row's slots in order k. */
WB_API wb_status wb_permute(const wb_dispatch* dispatch, const wb_tensor* rows, const wb_tensor* y, const wb_stream* stream) WB_NOEXCEPT;
WB_API wb_status wb_unpermute_reduce(const wb_dispatch* dispatch, const wb_tensor* y, int32_t weighted, const wb_tensor* z,
                                     const wb_stream* stream) WB_NOEXCEPT;
/* dy [S_padded, H] = weight * dz[row]; d_weight [S_padded] = <y[s], dz[row]> or null, then y may be null too. */
WB_API wb_status wb_unpermute_reduce_backward(const wb_dispatch* dispatch, const wb_tensor* y, int32_t weighted, const wb_tensor* dz, const wb_tensor* dy,
                                              float* d_weight, const wb_stream* stream) WB_NOEXCEPT;

typedef struct wb_exchange_bytes { /* sent by this rank to other ranks since its creation */
  uint64_t struct_size;
  int64_t payload, combined, ids, weights, counts, rows; /* payload: dispatched rows; combined: rows on their way back */
  int64_t dense_route_map, compact_route, dense_probability_row, local_probability_slice;
} wb_exchange_bytes;
WB_API wb_status wb_exchange_get_bytes(const wb_exchange* exchange, wb_exchange_bytes* bytes) WB_NOEXCEPT;
WB_API wb_status wb_exchange_get_status(wb_exchange* exchange, wb_step_status* status) WB_NOEXCEPT;

/* ---- the MoE layer --------------------------------------------------------------------------------------------------- */

enum wb_activation { WB_SWIGLU = 0, WB_CLAMPED_SWIGLU = 1, WB_RELU_SQUARED = 2 };
/* How operands of the expert matmuls are rounded; accumulation, weights and gradients stay fp32 (waybill/recipe.h). */
enum wb_recipe { WB_RECIPE_FP32 = 0, WB_RECIPE_BF16 = 1, WB_RECIPE_FP8 = 2, WB_RECIPE_MXFP8 = 3, WB_RECIPE_NVFP4 = 4 };
enum wb_recompute { WB_RECOMPUTE_NONE = 0, WB_RECOMPUTE_ACTIVATION = 1, WB_RECOMPUTE_LAYER = 2 };

typedef struct wb_moe_config {
  uint64_t struct_size;
  wb_router_config router; /* E, K, scores, groups and the aux, sequence and z losses; its struct_size must be set */
  int64_t H, F, latent, shared_F;
  int64_t T_max, alignment;
  double receive_factor;
  int32_t activation;
  float activation_limit, activation_alpha;
  int32_t expert_bias;
  float global_coefficient, bias_update_rate;
  int32_t mode, combine_wire, recompute, debug_checks;
  double capacity_factor; /* 0 = dropless; else an expert takes at most ceil(factor * T * K / E) routes of a rank's T tokens */
  int32_t pad_to_capacity;
  int32_t expert_tensor_parallel; /* F split over this many ranks */
  int32_t aux_counts_unbiased;    /* 1: losses count the set chosen without bias and groups */
  int32_t allow_dense_map;        /* 0: refuse batches whose compact routes are not legal */
  int32_t force_dense_map, hierarchy;
  int32_t overlap_shared; /* 1: compute the shared expert while rows travel; same bits */
  int32_t reserved;
  int32_t recipe;              /* wb_recipe */
  int32_t scale_rule;          /* wb_scale_rule; mxfp8, and fp8 with powers of two */
  int32_t power_of_two_scales; /* fp8; 0: fp32 scales */
  int32_t stochastic_rounding; /* nvfp4: of gradients */
  int32_t hadamard;            /* nvfp4: random rotation of the weight gradients' operands */
  int32_t reserved2;
} wb_moe_config;
WB_API wb_status wb_moe_config_init(wb_moe_config* config, uint64_t struct_size) WB_NOEXCEPT;

/* Parameters or gradients (fp32) in the caller's memory. Optional ones: rank 0. I = inner width (2F gated, else F), W = latent or H. */
typedef struct wb_moe_tensors {
  uint64_t struct_size;
  wb_tensor gate;        /* [E, H] */
  wb_tensor router_bias; /* [E] */
  wb_tensor w1, w2;      /* [L, I, W], [L, W, F] */
  wb_tensor b1, b2;      /* [L, I], [L, W] */
  wb_tensor shared_w1, shared_w2;
  wb_tensor latent_down, latent_up;
} wb_moe_tensors;

typedef struct wb_moe_layer wb_moe_layer;
typedef struct wb_moe_step wb_moe_step; /* what one forward keeps for its backward */
/* Collective over ep, the expert-parallel group, whose ranks must give one config (the error names the setting, both values and the rank).
   world: the group counts and losses are reduced over (may be the same handle). */
WB_API wb_status wb_moe_layer_create(const wb_moe_config* config, wb_fabric* ep, wb_fabric* world, wb_thread_pool* pool, wb_moe_layer** layer) WB_NOEXCEPT;
WB_API void wb_moe_layer_destroy(wb_moe_layer* layer) WB_NOEXCEPT;
WB_API wb_status wb_moe_step_create(wb_moe_step** step) WB_NOEXCEPT;
WB_API void wb_moe_step_destroy(wb_moe_step* step) WB_NOEXCEPT;
typedef struct wb_moe_forward_options {
  uint64_t struct_size;
  wb_tensor padding_mask;             /* [T] u8, 1 = padding, or not given */
  const wb_route* replay;             /* take these routes' ids, or null; given on every rank or on none */
  int64_t token_offset;               /* of row 0 in the global batch */
  double loss_tokens, loss_sequences; /* what the losses are averaged over; 0 = this call's, all ranks */
  int32_t training;                   /* 0: nothing is saved, no loss is computed, no counter moves */
  int32_t reserved;
  uint64_t rounding_seed;               /* of the recipe's random numbers: one a layer, step and micro-batch, the same on every rank of ep */
  const uint64_t* rounding_seed_device; /* wb_device_moe: null, or device memory that is read in its place when the kernels run */
} wb_moe_forward_options;
WB_API wb_status wb_moe_forward_options_init(wb_moe_forward_options* options, uint64_t struct_size) WB_NOEXCEPT;
/* x, out [T, H] fp32. options may be null: training, no padding. Collective. */
WB_API wb_status wb_moe_forward(wb_moe_layer* layer, const wb_moe_tensors* parameters, const wb_tensor* x, const wb_moe_forward_options* options,
                                const wb_tensor* out, wb_moe_step* step) WB_NOEXCEPT;
/* dx [T, H] is written, gradients are added to. Collective. */
WB_API wb_status wb_moe_backward(wb_moe_layer* layer, const wb_moe_tensors* parameters, const wb_moe_tensors* gradients, const wb_tensor* x,
                                 const wb_tensor* d_out, const wb_tensor* dx, wb_moe_step* step, float loss_scale) WB_NOEXCEPT;

typedef struct wb_moe_step_info {
  uint64_t struct_size;
  const int64_t* expert_counts; /* [E] over all ranks; alive as long as the step and until its next forward */
  int64_t E;
  wb_route route; /* this rank's routes, borrowed likewise */
  int64_t slots, rows, saved_bytes;
  double aux, sequence, global, z;
  int32_t valid, reserved;
  wb_step_status status;
} wb_moe_step_info;
/* bias += rate * sign(mean(counts) - counts), once per optimizer step; bias [E] fp32, counts [E] over all ranks. */
WB_API wb_status wb_update_expert_bias(float* bias, const int64_t* counts, int64_t E, float rate, int32_t subtract_mean) WB_NOEXCEPT;
WB_API wb_status wb_moe_step_get_info(const wb_moe_step* step, wb_moe_step_info* info) WB_NOEXCEPT;

/* ---- training -------------------------------------------------------------------------------------------------------- */

enum wb_train_event { WB_TRAIN_STEP = 0, WB_TRAIN_EVAL = 1 };
typedef struct wb_train_progress {
  uint64_t struct_size;
  int32_t event;
  int32_t valid; /* 0: this step's update was skipped */
  int64_t step;
  double loss;                                            /* nats per token: of the step, or held-out for WB_TRAIN_EVAL */
  double grad_norm, learning_rate, step_ms, tokens_per_s; /* WB_TRAIN_STEP only */
  int64_t tokens;                                         /* so far */
} wb_train_progress;
/* Called in order from rank 0's thread; valid during the call. Nonzero: the step in work is finished, a checkpoint saved, and the run ends. */
typedef int32_t (*wb_train_callback)(const wb_train_progress* progress, void* user);

typedef struct wb_train_result {
  uint64_t struct_size;
  int64_t step;
  double train_loss, held_out_loss, unigram_entropy, bigram_entropy; /* nats per token */
  double seconds;
  int32_t stopped; /* 1: by the callback; there is no held-out loss then */
  int32_t reserved;
} wb_train_result;
/* Trains what the TOML file says; overrides are "section.key=value". Ranks are threads of this process. run_folder must be new or empty,
 * or hold the run to go on with when `resume` is 1. callback and result may be null. */
WB_API wb_status wb_train(const char* config_path, const char* const* overrides, int32_t num_overrides, const char* run_folder, int32_t resume,
                          wb_train_callback callback, void* user, wb_train_result* result) WB_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* WAYBILL_WAYBILL_DISTRIBUTED_H_ */
