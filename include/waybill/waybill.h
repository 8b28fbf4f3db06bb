/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of Waybill: everything a binding needs, in plain C11.
 *
 * Rules of every function
 *   - It returns a wb_status and never throws, prints, exits or aborts. wb_last_error() has the text for this thread.
 *   - Structs that may grow start with struct_size. Fill them with their *_init function: it sets struct_size and the
 *     defaults. A library accepts the size of its own header and of older headers of the same WB_ABI_VERSION; fields that an
 *     older header lacks keep their defaults. Any other size is refused with both values.
 *   - Pointers are borrowed for the call unless it says otherwise. Handles are owned by the caller: destroy each once; a null
 *     handle is accepted by destroy. `stream` may be null: the calling thread only.
 *   - Results do not depend on the number of threads. CPU calls have finished when they return.
 *   - Letters: T tokens, H row width, E experts, K experts a token, F expert inner width, L local experts, P ranks,
 *     R received rows, S received slots.
 */
#ifndef WAYBILL_WAYBILL_H_
#define WAYBILL_WAYBILL_H_

#include <stddef.h>
#include <stdint.h>

#include "waybill/version.h"

#define WB_ABI_VERSION 1

#ifdef __cplusplus
#define WB_NOEXCEPT noexcept
extern "C" {
#else
#define WB_NOEXCEPT
#endif

/* ---- status and version ---------------------------------------------------------------------------------------------- */

typedef int32_t wb_status; /* one of wb_status_code */
enum wb_status_code {
  WB_OK = 0,
  WB_INVALID_ARGUMENT = 1,
  WB_UNSUPPORTED = 2,
  WB_OUT_OF_MEMORY = 3,
  WB_IO = 4,
  WB_TIMEOUT = 5,
  WB_PEER_FAILED = 6,
  WB_OVERFLOW = 7,
  WB_INTERNAL = 8,
  WB_CUDA = 9
};

WB_API const char* wb_status_name(wb_status status) WB_NOEXCEPT;
/* Text of the last failure in this thread, "" after none. Valid until the next failure in this thread. */
WB_API const char* wb_last_error(void) WB_NOEXCEPT;
WB_API const char* wb_version(void) WB_NOEXCEPT;
/* Version, compiler, instruction sets, CUDA archs and features in one line; static. */
WB_API const char* wb_build_info(void) WB_NOEXCEPT;
/* Call once at start as wb_check_version(WB_ABI_VERSION, WB_VERSION_STRING): refuses a header of another version, naming both. */
WB_API wb_status wb_check_version(int32_t abi_version, const char* header_version) WB_NOEXCEPT;
/* Bytes of a struct of these headers by its name ("wb_tensor"), or -1: for bindings that write the layouts down in another language. */
WB_API int64_t wb_struct_size(const char* name) WB_NOEXCEPT;

/* ---- tensors and streams --------------------------------------------------------------------------------------------- */

enum wb_dtype { WB_F32 = 0, WB_BF16 = 1, WB_F16 = 2, WB_I16 = 3, WB_I32 = 4, WB_I64 = 5, WB_U8 = 6, WB_U16 = 7, WB_F64 = 8, WB_F8E4M3 = 9, WB_F8E5M2 = 10 };
enum wb_device_type { WB_CPU = 0, WB_CUDA_DEVICE = 1 };

/* A view; frozen layout. rank 0 = not given. Strides count elements; all-zero strides mean contiguous. */
typedef struct wb_tensor {
  void* data;
  int32_t dtype;
  int32_t rank; /* 0..4 */
  int64_t shape[4];
  int64_t stride[4];
  int32_t device_type;
  int32_t device_index;
} wb_tensor;

typedef struct wb_thread_pool wb_thread_pool;
WB_API wb_status wb_thread_pool_create(int32_t num_threads, wb_thread_pool** pool) WB_NOEXCEPT; /* 0 = all usable cores */
WB_API void wb_thread_pool_destroy(wb_thread_pool* pool) WB_NOEXCEPT;

typedef struct wb_stream {
  uint64_t struct_size;
  int32_t device_type, device_index;
  void* native;         /* cudaStream_t, or null on the CPU */
  wb_thread_pool* pool; /* CPU: threads to use, or null */
} wb_stream;

/* ---- routes and the router ------------------------------------------------------------------------------------------- */

/* Compact routes in the caller's memory. ids [T, K] int16 or int32 (-1 = none), weights [T, K] fp32, counts [E] int32 or null. */
typedef struct wb_route {
  uint64_t struct_size;
  int64_t T, K, E;
  int32_t id_dtype;
  int32_t device_type, device_index;
  int32_t reserved;
  void* ids;
  float* weights;
  int32_t* counts;
} wb_route;

enum wb_route_check { WB_ROUTE_ALLOW_OUT_OF_RANGE = 1, WB_ROUTE_ALLOW_DUPLICATES = 2 };
WB_API wb_status wb_route_validate(const wb_route* route, uint32_t allow) WB_NOEXCEPT;

typedef struct wb_route_stats {
  uint64_t struct_size;
  int64_t num_routes; /* valid ones */
  int64_t experts_min, experts_max, hottest_expert;
  double experts_mean, entropy; /* of the load, nats */
  int64_t rows_min, rows_max;   /* deduplicated rows a rank of P would receive */
  double rows_mean;
} wb_route_stats;
WB_API wb_status wb_route_get_stats(const wb_route* route, int32_t P, wb_route_stats* stats) WB_NOEXCEPT;

/* Synthetic routes with a named skew, "W0" to "W9" or their long names (waybill/workload.h, default parameters): ids [T, K] int32 of a batch, in host memory;
   row_bounds [P + 1] int64, or null: source p brings rows row_bounds[p] to row_bounds[p + 1]. A function of the arguments alone, P apart. */
WB_API wb_status wb_workload_ids(const char* workload, uint64_t seed, int64_t step, int64_t T, int64_t K, int64_t E, int32_t P, int32_t* ids,
                                 int64_t* row_bounds) WB_NOEXCEPT;
/* Tokens of a batch of a workload: T, or for W9 as many as give every expert 1 or 2 rows. */
WB_API wb_status wb_workload_tokens(const char* workload, int64_t T, int64_t K, int64_t E, int64_t* tokens) WB_NOEXCEPT;

enum wb_score { WB_SOFTMAX = 0, WB_SOFTMAX_SELECTED = 1, WB_SIGMOID = 2, WB_SQRT_SOFTPLUS = 3 };
enum wb_group_score { WB_GROUP_TOP2_SUM = 0, WB_GROUP_TOPK_PER_GROUP = 1 };

typedef struct wb_router_config {
  uint64_t struct_size;
  int64_t E, K;
  int64_t num_groups, num_kept_groups;
  int64_t offset_alignment;
  int64_t sequence_length;
  int32_t score, group_score, renormalise, forced_balance;
  float scaling_factor, normalise_epsilon;
  float aux_coefficient, sequence_coefficient, z_coefficient;
  int32_t reserved;
} wb_router_config;
WB_API wb_status wb_router_config_init(wb_router_config* config, uint64_t struct_size) WB_NOEXCEPT;

typedef struct wb_router_inputs {
  uint64_t struct_size;
  wb_tensor logits, expert_bias, expert_mask, padding_mask, replay_ids; /* all but logits optional */
  int64_t token_offset;
  const int32_t* aux_counts; /* [E] for the auxiliary loss, reduced over ranks by the caller */
  double aux_tokens, loss_tokens, num_sequences;
  const float* weight_factors; /* backward: [T] of wb_router_outputs, or null */
  const double* score_sums;    /* losses: [E+1] of wb_router_outputs for the same logits, or null */
} wb_router_inputs;

typedef struct wb_step_status { /* sticky: flags are OR-ed, demands keep their maximum; clear by wb_step_status_init */
  uint64_t struct_size;
  uint32_t flags, reserved;
  int64_t slot_demand, slot_capacity, row_demand, row_capacity;
  int64_t num_bad_ids, num_nonfinite_rows, num_short_rows;
} wb_step_status;
WB_API wb_status wb_step_status_init(wb_step_status* status, uint64_t struct_size) WB_NOEXCEPT;

/* The same record as kernels keep it, in device memory; frozen layout. Start from all zeros; timeouts are not the router's. */
typedef struct wb_status_word {
  uint32_t flags;
  int32_t timeout_rank, timeout_peer, timeout_phase;
  int64_t timeout_expected, timeout_seen;
  int64_t slot_demand, slot_capacity, row_demand, row_capacity;
  int64_t num_bad_ids, num_nonfinite_rows, num_short_rows;
} wb_status_word;

typedef struct wb_router_outputs {
  uint64_t struct_size;
  wb_route route;              /* ids and weights written; counts when given */
  int32_t* counts_unbiased;    /* [E] or null */
  int32_t* offsets;            /* [E+1] or null */
  int32_t* aligned_offsets;    /* [E+1] or null */
  wb_step_status* status;      /* added to, or null; CPU only: a CUDA call does not wait to fill host memory */
  wb_status_word* status_word; /* added to, in the logits' memory, or null */
  float* weight_factors;       /* [T] or null: what wb_router_backward() can use instead of the logits (sigmoid) */
  double* score_sums;          /* [E+1] or null: what wb_router_losses() can use instead of the logits */
} wb_router_outputs;

/* The router's four calls take memory of the CPU, or, where the library has CUDA kernels, memory of one CUDA device throughout: pointers
 * inside the structs too. They then queue on stream->native (null stream: the device's default stream) and return; all but
 * wb_router_losses() can be captured in a graph once a call of the same sizes has run on the stream. */
WB_API wb_status wb_router_forward(const wb_router_config* config, const wb_router_inputs* inputs, const wb_router_outputs* outputs,
                                   const wb_stream* stream) WB_NOEXCEPT;
/* losses[3] = auxiliary, sequence, z: this call's share, coefficients included. In host memory: a CUDA call waits for its stream. */
WB_API wb_status wb_router_losses(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, double losses[3],
                                  const wb_stream* stream) WB_NOEXCEPT;
/* The same without a wait: losses[3] in the logits' memory. */
WB_API wb_status wb_router_losses_into(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, double* losses,
                                       const wb_stream* stream) WB_NOEXCEPT;
/* d_logits [T, E] fp32 is written. d_weights [T, K] fp32. loss_scale multiplies the losses' part only. */
WB_API wb_status wb_router_backward(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, const float* d_weights,
                                    float loss_scale, const wb_tensor* d_logits, const wb_stream* stream) WB_NOEXCEPT;
/* For automatic differentiation: loss_weights[3] (auxiliary, sequence, z; null = 1) multiply the coefficients and, as losses[3], are in the logits'
 * memory. Neither call waits. */
WB_API wb_status wb_router_losses_weighted(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, const float* loss_weights,
                                           float* losses, const wb_stream* stream) WB_NOEXCEPT;
WB_API wb_status wb_router_backward_weighted(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, const float* d_weights,
                                             const float* loss_weights, const wb_tensor* d_logits, const wb_stream* stream) WB_NOEXCEPT;

/* ---- grouped GEMM ---------------------------------------------------------------------------------------------------- */

typedef struct wb_grouped_gemm_args {
  uint64_t struct_size;
  wb_tensor a;       /* forward, wgrad: [*, C]; dgrad: the result da [S, C] */
  wb_tensor weights; /* [L, N, C] or [L, C, N]; wgrad: the result */
  wb_tensor offsets; /* [L+1] int32 */
  wb_tensor y;       /* forward: the result [S, N]; dgrad, wgrad: dy */
  wb_tensor a_rows;  /* [S] int32 gather list for a, or not given (forward, wgrad) */
  wb_tensor bias;    /* [L, N] fp32 or not given; wgrad: the result d_bias */
  int32_t weights_are_lcn;
  int32_t accumulate;
} wb_grouped_gemm_args;
/* These, wb_group_rows, wb_quantize and wb_dequantize take memory of one CUDA device throughout too, where the library has CUDA kernels. They then queue on
 * stream->native (null stream: the device's default stream) and return; offsets are not checked, but nothing outside the tensors is touched. */
WB_API wb_status wb_grouped_gemm(const wb_grouped_gemm_args* args, const wb_stream* stream) WB_NOEXCEPT;
WB_API wb_status wb_grouped_gemm_dgrad(const wb_grouped_gemm_args* args, const wb_stream* stream) WB_NOEXCEPT;
WB_API wb_status wb_grouped_gemm_wgrad(const wb_grouped_gemm_args* args, const wb_stream* stream) WB_NOEXCEPT;
/* Writes offsets [L+1] from sizes [L] (null: offsets are given) and sets the rows [S, *] from offsets[L] on to zero (null: none). Sizes that are negative or
 * pass S: refused on the CPU, cut off on a GPU. */
WB_API wb_status wb_group_rows(const wb_tensor* sizes, const wb_tensor* offsets, const wb_tensor* rows, int64_t S, const wb_stream* stream) WB_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#include "waybill/waybill_device.h"

#endif /* WAYBILL_WAYBILL_H_ */
