/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of ABI 1 on 64-bit machines, checked by the C compiler. A change here is a change of the ABI: fields are only ever added
 * at the end, and the old size stays readable (src/capi/guard.h, first_size). */
#include "waybill/waybill.h"

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "size of " #type)
#define AT(type, field, bytes) _Static_assert(offsetof(type, field) == (bytes), "offset of " #type "." #field)

SIZE(wb_tensor, 88);
AT(wb_tensor, dtype, 8);
AT(wb_tensor, shape, 16);
AT(wb_tensor, stride, 48);
AT(wb_tensor, device_type, 80);
SIZE(wb_stream, 32);
AT(wb_stream, native, 16);
AT(wb_stream, pool, 24);
SIZE(wb_route, 72);
AT(wb_route, id_dtype, 32);
AT(wb_route, ids, 48);
AT(wb_route, counts, 64);
SIZE(wb_route_stats, 80);
AT(wb_route_stats, experts_mean, 40);
AT(wb_route_stats, rows_mean, 72);
SIZE(wb_router_config, 96);
AT(wb_router_config, num_groups, 24);
AT(wb_router_config, score, 56);
AT(wb_router_config, scaling_factor, 72);
AT(wb_router_config, z_coefficient, 88);
SIZE(wb_router_inputs, 488);
AT(wb_router_inputs, expert_bias, 96);
AT(wb_router_inputs, token_offset, 448);
AT(wb_router_inputs, num_sequences, 480);
SIZE(wb_step_status, 72);
AT(wb_step_status, slot_demand, 16);
AT(wb_step_status, num_short_rows, 64);
SIZE(wb_router_outputs, 112);
AT(wb_router_outputs, counts_unbiased, 80);
AT(wb_router_outputs, status, 104);
SIZE(wb_grouped_gemm_args, 544);
AT(wb_grouped_gemm_args, offsets, 184);
AT(wb_grouped_gemm_args, bias, 448);
AT(wb_grouped_gemm_args, accumulate, 540);
SIZE(wb_quant_config, 48);
AT(wb_quant_config, stochastic, 20);
AT(wb_quant_config, seed, 40);
SIZE(wb_quantized, 272);
AT(wb_quantized, group_scales, 184);
SIZE(wb_fabric_transport, 24);
AT(wb_fabric_transport, all_to_all, 16);
SIZE(wb_exchange_config, 72);
AT(wb_exchange_config, receive_factor, 48);
AT(wb_exchange_config, debug_checks, 64);
AT(wb_exchange_config, hierarchy, 68);
SIZE(wb_dispatch_info, 88);
AT(wb_dispatch_info, row_offsets, 40);
AT(wb_dispatch_info, slot_weight, 72);
AT(wb_dispatch_info, valid, 80);
SIZE(wb_exchange_bytes, 88);
AT(wb_exchange_bytes, rows, 48);
AT(wb_exchange_bytes, local_probability_slice, 80);
SIZE(wb_moe_config, 264);
AT(wb_moe_config, router, 8);
AT(wb_moe_config, H, 104);
AT(wb_moe_config, receive_factor, 152);
AT(wb_moe_config, activation, 160);
AT(wb_moe_config, debug_checks, 196);
AT(wb_moe_config, capacity_factor, 200);
AT(wb_moe_config, force_dense_map, 224);
AT(wb_moe_config, overlap_shared, 232);
AT(wb_moe_config, recipe, 240);
AT(wb_moe_config, hadamard, 256);
SIZE(wb_moe_forward_options, 144);
AT(wb_moe_forward_options, replay, 96);
AT(wb_moe_forward_options, training, 128);
AT(wb_moe_forward_options, rounding_seed, 136);
SIZE(wb_moe_tensors, 888);
AT(wb_moe_tensors, w1, 184);
AT(wb_moe_tensors, latent_up, 800);
SIZE(wb_moe_step_info, 232);
AT(wb_moe_step_info, route, 24);
AT(wb_moe_step_info, aux, 120);
AT(wb_moe_step_info, status, 160);
SIZE(wb_train_progress, 72);
AT(wb_train_progress, step, 16);
AT(wb_train_progress, tokens, 64);
SIZE(wb_train_result, 64);
AT(wb_train_result, train_loss, 16);
AT(wb_train_result, stopped, 56);
