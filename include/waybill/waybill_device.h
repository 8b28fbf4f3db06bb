/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI, third part: the MoE layer and the exchange on GPUs. Included by waybill.h; the rules are there. A library without CUDA has these functions
 * too; they return WB_UNSUPPORTED.
 *
 * One wb_device_moe is one rank of a group of one process a GPU, of a group within one process, or alone. forward and backward queue work on the caller's
 * stream and return: no host wait, nothing allocated but by the first calls of a stream, capturable in CUDA graphs after one call of either on that device.
 * What a forward leaves for its backward is an array of the caller's, so that any number of forwards may be in flight, a backward may run twice, and frameworks
 * may offload it. Bit-equal on repeat and between eager and captured runs. Calls of one layer must not overlap on the device, threads that make them take
 * turns; the ranks make the same calls in one order.
 */
#ifndef WAYBILL_WAYBILL_DEVICE_H_
#define WAYBILL_WAYBILL_DEVICE_H_

#include "waybill/waybill_distributed.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How processes find each other: rank 0 listens on `port`, the others reach it at `address`. One NVLink domain; with a config whose hierarchy is two_level or
   auto also several, of equally many ranks one behind the other, or nodes of as many ranks as the environment's WAYBILL_RANKS_PER_NODE says. */
typedef struct wb_process_group {
  uint64_t struct_size;
  int32_t rank, size;
  int32_t device; /* GPU of this process */
  int32_t port;
  const char* address; /* name or number of rank 0's host */
} wb_process_group;

/* A group within one process, rank r on devices[r]: wb_device_moe_create_local, wb_device_exchange_create_local. One call makes all ranks and is no collective.
   The ranks' first calls wait for each other on the host (60 s), so each rank wants a thread of its own. GPUs reach each other's memory. Ranks may share a
   GPU, to try a group without several GPUs: their kernels then take small shares of it (as many as CUDA_DEVICE_MAX_CONNECTIONS lets run beside each other; a
   stream a rank), and start/done pairs are refused. */

typedef struct wb_device_moe wb_device_moe;
/* config.T_max must be given; what the layer on GPUs lacks is refused by name. group: null = one rank; else collective, all ranks with one config. Not in
   a capture: allocates windows and scratch, waits for the device. */
WB_API wb_status wb_device_moe_create(const wb_moe_config* config, int32_t device, const wb_process_group* group, wb_device_moe** layer) WB_NOEXCEPT;
/* devices [P] in; layers [P] out, each destroyed by itself; on failure none is made. */
WB_API wb_status wb_device_moe_create_local(const wb_moe_config* config, int32_t P, const int32_t* devices, wb_device_moe** layers) WB_NOEXCEPT;
WB_API void wb_device_moe_destroy(wb_device_moe* layer) WB_NOEXCEPT;
/* Bytes that a forward leaves for its backward on each of P ranks, by config alone; needs no GPU. */
WB_API wb_status wb_device_moe_saved_bytes(const wb_moe_config* config, int32_t P, int64_t* bytes) WB_NOEXCEPT;

/* All in device memory; all but `out` and, for training, `saved` may be left out (rank 0). */
typedef struct wb_device_moe_outputs {
  uint64_t struct_size;
  wb_tensor out;          /* [T, H] bf16 or f32 */
  wb_tensor ids, weights; /* [T, K] i16 (i32 above 32,768 experts), f32: this rank's routes */
  wb_tensor counts;       /* [E] i32: routes per expert over all ranks */
  wb_tensor losses;       /* [4] f32: auxiliary, sequence, global, z: this rank's share */
  wb_tensor status;       /* [6] i32: valid, slot demand, slot capacity, rows, slots, flags (1 slots, 2 rows above their budget, 8 a rank was lost) */
  wb_tensor saved;        /* [wb_device_moe_saved_bytes] u8, aligned to 16 bytes */
} wb_device_moe_outputs;
/* x [T, H] and matmul weights bf16, router_bias, b1, b2 f32, everything on the layer's device. options may be null: training, no padding; options.replay's ids
   are device memory. Losses count P * T tokens unless options.loss_tokens says otherwise; weights of wb_device_moe_backward and of the caller correct for
   padding. Without `training` nothing is left for a backward. */
WB_API wb_status wb_device_moe_forward(wb_device_moe* layer, const wb_moe_tensors* parameters, const wb_tensor* x, const wb_moe_forward_options* options,
                                       const wb_device_moe_outputs* outputs, const wb_stream* stream) WB_NOEXCEPT;
/* gradients: of matmul weights and the gate bf16 or f32, of b1, b2 f32; all are written, not added to. d_out bf16, dx bf16 or f32 [T, H]. saved, x and
   options as in the forward; `saved` is read only. loss_weights [3] f32 on the device: factors of the gradients of the auxiliary or global, the sequence
   and the z loss; null = 1 each. Where the config has the auxiliary and the global loss [6]: the fourth is the global loss's, the last two are read and not
   used. */
WB_API wb_status wb_device_moe_backward(wb_device_moe* layer, const wb_moe_tensors* parameters, const wb_moe_tensors* gradients, const wb_tensor* x,
                                        const wb_tensor* d_out, const wb_tensor* dx, const wb_moe_forward_options* options, const wb_tensor* saved,
                                        const float* loss_weights, const wb_stream* stream) WB_NOEXCEPT;
/* Sticky faults of all calls so far; waits for the device. WB_PEER_FAILED with the text where a wait for another rank ran out, or the group has lost one. */
WB_API wb_status wb_device_moe_get_status(wb_device_moe* layer, wb_step_status* status, const wb_stream* stream) WB_NOEXCEPT;

/* ---- dispatch and combine --------------------------------------------------------------------------------------------- */

/* One rank's exchange on one GPU. Each call plans its batch again from the compact routes, so that no state lives between calls. config: as
   wb_exchange_create; T_max must be given, H a multiple of 8. One thread at a time: nothing locks it. Otherwise as wb_device_moe_create. */
typedef struct wb_device_exchange wb_device_exchange;
WB_API wb_status wb_device_exchange_create(const wb_exchange_config* config, int32_t device, const wb_process_group* group,
                                           wb_device_exchange** exchange) WB_NOEXCEPT;
/* devices [P] in; exchanges [P] out, as wb_device_moe_create_local. */
WB_API wb_status wb_device_exchange_create_local(const wb_exchange_config* config, int32_t P, const int32_t* devices,
                                                 wb_device_exchange** exchanges) WB_NOEXCEPT;
WB_API void wb_device_exchange_destroy(wb_device_exchange* exchange) WB_NOEXCEPT;
/* x [T, H] f32 or bf16 -> slots [S, H] of that type by local expert, S = the slot budget with padding; slots of no route are 0. sizes [L] i32 with padding
   and valid [1] i32 on the device: after an exceeded budget on any rank all of them are 0. */
WB_API wb_status wb_device_exchange_dispatch(wb_device_exchange* exchange, const wb_route* route, const wb_tensor* x, const wb_tensor* slots, int32_t* sizes,
                                             int32_t* valid, const wb_stream* stream) WB_NOEXCEPT;
/* y [S, H] f32 or bf16 -> out [T, H] f32: slots (times their weights where `weighted`) in order k, then ranks in rank order. */
WB_API wb_status wb_device_exchange_combine(wb_device_exchange* exchange, const wb_route* route, const wb_tensor* y, int32_t weighted, const wb_tensor* out,
                                            const wb_stream* stream) WB_NOEXCEPT;
/* Backward of the weighted combine: d_out [T, H] f32 -> dy [S, H] of y's type, d_weights [T, K] f32. */
WB_API wb_status wb_device_exchange_combine_backward(wb_device_exchange* exchange, const wb_route* route, const wb_tensor* d_out, const wb_tensor* y,
                                                     const wb_tensor* dy, float* d_weights, const wb_stream* stream) WB_NOEXCEPT;

/* dispatch and the weighted combine in two halves: start queues the transfer on a stream of the exchange's own, done makes `stream` wait for it and writes the
   results, those of the whole call bit for bit. What is queued on `stream` in between runs beside the transfer. Operands may be written again behind start
   on `stream`. One pair at a time an exchange: another start drops what was begun. The first start allocates; not in a capture. All ranks make the same
   calls in one order. Every other exchange and MoE layer of this process on that GPU queues behind transfers in flight; graphs that are replayed and other
   libraries' collectives do not. */
WB_API wb_status wb_device_exchange_dispatch_start(wb_device_exchange* exchange, const wb_route* route, const wb_tensor* x,
                                                   const wb_stream* stream) WB_NOEXCEPT;
WB_API wb_status wb_device_exchange_dispatch_done(wb_device_exchange* exchange, const wb_tensor* slots, int32_t* sizes, int32_t* valid,
                                                  const wb_stream* stream) WB_NOEXCEPT;
WB_API wb_status wb_device_exchange_combine_start(wb_device_exchange* exchange, const wb_route* route, const wb_tensor* y, const wb_stream* stream) WB_NOEXCEPT;
WB_API wb_status wb_device_exchange_combine_done(wb_device_exchange* exchange, const wb_tensor* out, const wb_stream* stream) WB_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* WAYBILL_WAYBILL_DEVICE_H_ */
