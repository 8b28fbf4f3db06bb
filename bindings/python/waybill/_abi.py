# SPDX-License-Identifier: Apache-2.0
"""The C ABI of libwaybill.so in ctypes: structs, enums and prototypes of include/waybill/waybill.h, nothing else.

Every struct here is compared with `wb_struct_size` of the library when it is loaded.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

ABI_VERSION = 1
VERSION = "0.1.0"

OK, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, IO, TIMEOUT, PEER_FAILED, OVERFLOW, INTERNAL, CUDA = range(10)
F32, BF16, F16, I16, I32, I64, U8, U16, F64, F8E4M3, F8E5M2 = range(11)
DTYPE_NAMES = ("float32", "bfloat16", "float16", "int16", "int32", "int64", "uint8", "uint16", "float64", "float8_e4m3", "float8_e5m2")
DTYPE_BYTES = (4, 2, 2, 2, 4, 8, 1, 2, 8, 1, 1)

i32, i64, u32, u64, f32, f64 = c.c_int32, c.c_int64, c.c_uint32, c.c_uint64, c.c_float, c.c_double
p_i32, p_i64, p_f32 = c.POINTER(i32), c.POINTER(i64), c.POINTER(f32)


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("dtype", i32), ("rank", i32), ("shape", i64 * 4), ("stride", i64 * 4), ("device_type", i32), ("device_index", i32)]


class Stream(c.Structure):
    _fields_ = [("struct_size", u64), ("device_type", i32), ("device_index", i32), ("native", c.c_void_p), ("pool", c.c_void_p)]


class Route(c.Structure):
    _fields_ = [("struct_size", u64), ("T", i64), ("K", i64), ("E", i64), ("id_dtype", i32), ("device_type", i32), ("device_index", i32), ("reserved", i32),
                ("ids", c.c_void_p), ("weights", p_f32), ("counts", p_i32)]  # fmt: skip


class RouterConfig(c.Structure):
    _fields_ = [("struct_size", u64), ("E", i64), ("K", i64), ("num_groups", i64), ("num_kept_groups", i64), ("offset_alignment", i64),
                ("sequence_length", i64),
                ("score", i32), ("group_score", i32), ("renormalise", i32), ("forced_balance", i32), ("scaling_factor", f32), ("normalise_epsilon", f32),
                ("aux_coefficient", f32), ("sequence_coefficient", f32), ("z_coefficient", f32), ("reserved", i32)]  # fmt: skip


class RouterInputs(c.Structure):
    _fields_ = [("struct_size", u64), ("logits", Tensor), ("expert_bias", Tensor), ("expert_mask", Tensor), ("padding_mask", Tensor), ("replay_ids", Tensor),
                ("token_offset", i64), ("aux_counts", p_i32), ("aux_tokens", f64), ("loss_tokens", f64), ("num_sequences", f64),
                ("weight_factors", c.c_void_p), ("score_sums", c.c_void_p)]  # fmt: skip


class StepStatus(c.Structure):
    _fields_ = [("struct_size", u64), ("flags", u32), ("reserved", u32), ("slot_demand", i64), ("slot_capacity", i64), ("row_demand", i64),
                ("row_capacity", i64), ("num_bad_ids", i64), ("num_nonfinite_rows", i64), ("num_short_rows", i64)]  # fmt: skip


class RouterOutputs(c.Structure):
    _fields_ = [("struct_size", u64), ("route", Route), ("counts_unbiased", p_i32), ("offsets", p_i32), ("aligned_offsets", p_i32),
                ("status", c.POINTER(StepStatus)), ("status_word", c.c_void_p), ("weight_factors", c.c_void_p), ("score_sums", c.c_void_p)]  # fmt: skip


class GroupedGemmArgs(c.Structure):
    _fields_ = [("struct_size", u64), ("a", Tensor), ("weights", Tensor), ("offsets", Tensor), ("y", Tensor), ("a_rows", Tensor), ("bias", Tensor),
                ("weights_are_lcn", i32), ("accumulate", i32)]  # fmt: skip


class QuantConfig(c.Structure):
    _fields_ = [("struct_size", u64), ("element", i32), ("scale", i32), ("rule", i32), ("stochastic", i32), ("block_rows", i64), ("block_columns", i64),
                ("seed", u64)]  # fmt: skip


class Quantized(c.Structure):
    _fields_ = [("struct_size", u64), ("codes", Tensor), ("scales", Tensor), ("group_scales", Tensor)]


class ActivatedRows(c.Structure):
    _fields_ = [("struct_size", u64), ("activation", i32), ("activation_limit", f32), ("activation_alpha", f32), ("reserved", i32), ("h", Tensor),
                ("weight", Tensor), ("da", Tensor), ("d_weight", Tensor), ("partial_sums", Tensor), ("wide", Tensor)]  # fmt: skip


AllToAll = c.CFUNCTYPE(i32, c.c_void_p, c.c_void_p, p_i64, c.c_void_p, p_i64, c.c_void_p, i64)


class FabricTransport(c.Structure):
    _fields_ = [("struct_size", u64), ("user", c.c_void_p), ("all_to_all", AllToAll)]


class ExchangeConfig(c.Structure):
    _fields_ = [("struct_size", u64), ("H", i64), ("E", i64), ("K", i64), ("T_max", i64), ("alignment", i64), ("receive_factor", f64), ("mode", i32),
                ("combine_wire", i32), ("debug_checks", i32), ("hierarchy", i32)]  # fmt: skip


class DispatchInfo(c.Structure):
    _fields_ = [("struct_size", u64), ("R", i64), ("S", i64), ("S_padded", i64), ("L", i64), ("row_offsets", p_i64), ("expert_offsets", p_i32),
                ("expert_counts", p_i32), ("slot_row", p_i32), ("slot_weight", p_f32), ("valid", i32), ("reserved", i32)]  # fmt: skip


class ExchangeBytes(c.Structure):
    _fields_ = [("struct_size", u64)] + [(name, i64) for name in ("payload", "combined", "ids", "weights", "counts", "rows", "dense_route_map", "compact_route",
                                                                  "dense_probability_row", "local_probability_slice")]  # fmt: skip


class MoeConfig(c.Structure):
    _fields_ = [("struct_size", u64), ("router", RouterConfig), ("H", i64), ("F", i64), ("latent", i64), ("shared_F", i64), ("T_max", i64), ("alignment", i64),
                ("receive_factor", f64), ("activation", i32), ("activation_limit", f32), ("activation_alpha", f32), ("expert_bias", i32),
                ("global_coefficient", f32), ("bias_update_rate", f32), ("mode", i32), ("combine_wire", i32), ("recompute", i32), ("debug_checks", i32),
                ("capacity_factor", f64), ("pad_to_capacity", i32), ("expert_tensor_parallel", i32), ("aux_counts_unbiased", i32), ("allow_dense_map", i32),
                ("force_dense_map", i32), ("hierarchy", i32), ("overlap_shared", i32), ("reserved", i32), ("recipe", i32), ("scale_rule", i32),
                ("power_of_two_scales", i32), ("stochastic_rounding", i32), ("hadamard", i32), ("reserved2", i32)]  # fmt: skip


MOE_TENSORS = ("gate", "router_bias", "w1", "w2", "b1", "b2", "shared_w1", "shared_w2", "latent_down", "latent_up")


class MoeTensors(c.Structure):
    _fields_ = [("struct_size", u64)] + [(name, Tensor) for name in MOE_TENSORS]


class MoeForwardOptions(c.Structure):
    _fields_ = [("struct_size", u64), ("padding_mask", Tensor), ("replay", c.POINTER(Route)), ("token_offset", i64), ("loss_tokens", f64),
                ("loss_sequences", f64), ("training", i32), ("reserved", i32), ("rounding_seed", u64),
                ("rounding_seed_device", c.c_void_p)]  # fmt: skip


class MoeStepInfo(c.Structure):
    _fields_ = [("struct_size", u64), ("expert_counts", p_i64), ("E", i64), ("route", Route), ("slots", i64), ("rows", i64), ("saved_bytes", i64),
                ("aux", f64), ("sequence", f64), ("global_loss", f64), ("z", f64), ("valid", i32), ("reserved", i32), ("status", StepStatus)]  # fmt: skip


class ProcessGroup(c.Structure):
    _fields_ = [("struct_size", u64), ("rank", i32), ("size", i32), ("device", i32), ("port", i32), ("address", c.c_char_p)]


class DeviceMoeOutputs(c.Structure):
    _fields_ = [("struct_size", u64)] + [(name, Tensor) for name in ("out", "ids", "weights", "counts", "losses", "status", "saved")]


STRUCTS = {
    "wb_tensor": Tensor, "wb_stream": Stream, "wb_route": Route, "wb_router_config": RouterConfig, "wb_router_inputs": RouterInputs,
    "wb_step_status": StepStatus, "wb_router_outputs": RouterOutputs, "wb_grouped_gemm_args": GroupedGemmArgs, "wb_quant_config": QuantConfig,
    "wb_quantized": Quantized, "wb_fabric_transport": FabricTransport, "wb_exchange_config": ExchangeConfig, "wb_dispatch_info": DispatchInfo,
    "wb_exchange_bytes": ExchangeBytes, "wb_moe_config": MoeConfig, "wb_moe_tensors": MoeTensors, "wb_moe_forward_options": MoeForwardOptions,
    "wb_moe_step_info": MoeStepInfo, "wb_process_group": ProcessGroup, "wb_device_moe_outputs": DeviceMoeOutputs,
    "wb_activated_rows": ActivatedRows,
}  # fmt: skip

_handle, _out = c.c_void_p, c.POINTER(c.c_void_p)
_tensor = c.POINTER(Tensor)

# name -> (result, arguments). "status" results are turned into exceptions by _library.check().
PROTOTYPES: dict[str, tuple[object, list[object]]] = {
    "wb_status_name": (c.c_char_p, [i32]),
    "wb_last_error": (c.c_char_p, []),
    "wb_version": (c.c_char_p, []),
    "wb_build_info": (c.c_char_p, []),
    "wb_check_version": (i32, [i32, c.c_char_p]),
    "wb_struct_size": (i64, [c.c_char_p]),
    "wb_thread_pool_create": (i32, [i32, _out]),
    "wb_thread_pool_destroy": (None, [_handle]),
    "wb_route_validate": (i32, [c.POINTER(Route), u32]),
    "wb_workload_ids": (i32, [c.c_char_p, c.c_uint64, i64, i64, i64, i64, i32, c.c_void_p, c.c_void_p]),
    "wb_workload_tokens": (i32, [c.c_char_p, i64, i64, i64, p_i64]),
    "wb_router_config_init": (i32, [c.POINTER(RouterConfig), u64]),
    "wb_step_status_init": (i32, [c.POINTER(StepStatus), u64]),
    "wb_router_forward": (i32, [c.POINTER(RouterConfig), c.POINTER(RouterInputs), c.POINTER(RouterOutputs), c.POINTER(Stream)]),
    "wb_router_losses": (i32, [c.POINTER(RouterConfig), c.POINTER(RouterInputs), c.POINTER(Route), f64 * 3, c.POINTER(Stream)]),
    "wb_router_losses_into": (i32, [c.POINTER(RouterConfig), c.POINTER(RouterInputs), c.POINTER(Route), c.c_void_p, c.POINTER(Stream)]),
    "wb_router_backward": (i32, [c.POINTER(RouterConfig), c.POINTER(RouterInputs), c.POINTER(Route), c.c_void_p, f32, _tensor, c.POINTER(Stream)]),
    "wb_router_losses_weighted": (i32, [c.POINTER(RouterConfig), c.POINTER(RouterInputs), c.POINTER(Route), c.c_void_p, c.c_void_p, c.POINTER(Stream)]),
    "wb_router_backward_weighted": (i32, [c.POINTER(RouterConfig), c.POINTER(RouterInputs), c.POINTER(Route), c.c_void_p, c.c_void_p, _tensor,
                                          c.POINTER(Stream)]),
    "wb_group_rows": (i32, [_tensor, _tensor, _tensor, i64, c.POINTER(Stream)]),
    "wb_grouped_gemm": (i32, [c.POINTER(GroupedGemmArgs), c.POINTER(Stream)]),
    "wb_grouped_gemm_dgrad": (i32, [c.POINTER(GroupedGemmArgs), c.POINTER(Stream)]),
    "wb_grouped_gemm_wgrad": (i32, [c.POINTER(GroupedGemmArgs), c.POINTER(Stream)]),
    "wb_quant_config_init": (i32, [c.POINTER(QuantConfig), u64]),
    "wb_quantize": (i32, [c.POINTER(QuantConfig), _tensor, _tensor, c.POINTER(Quantized), c.POINTER(Stream)]),
    "wb_activated_rows_init": (i32, [c.POINTER(ActivatedRows), u64]),
    "wb_quantize_activated": (i32, [c.POINTER(QuantConfig), c.POINTER(ActivatedRows), _tensor, c.POINTER(Quantized), c.POINTER(Stream)]),
    "wb_dequantize": (i32, [c.POINTER(QuantConfig), c.POINTER(Quantized), _tensor, _tensor, c.POINTER(Stream)]),
    "wb_group_create": (i32, [i32, i64, i32, _out]),
    "wb_group_destroy": (None, [_handle]),
    "wb_group_fabric": (i32, [_handle, i32, _out]),
    "wb_fabric_create": (i32, [c.POINTER(FabricTransport), i32, i32, i32, _out]),
    "wb_fabric_destroy": (None, [_handle]),
    "wb_fabric_abort": (i32, [_handle, c.c_char_p]),
    "wb_fabric_barrier": (i32, [_handle]),
    "wb_fabric_all_reduce_i64": (i32, [_handle, c.c_void_p, i64]),
    "wb_fabric_all_reduce_f32": (i32, [_handle, c.c_void_p, i64]),
    "wb_exchange_config_init": (i32, [c.POINTER(ExchangeConfig), u64]),
    "wb_exchange_create": (i32, [c.POINTER(ExchangeConfig), _handle, _out]),
    "wb_exchange_destroy": (None, [_handle]),
    "wb_exchange_plan": (i32, [_handle, c.POINTER(Route), _out]),
    "wb_dispatch_destroy": (None, [_handle]),
    "wb_dispatch_get_info": (i32, [_handle, c.POINTER(DispatchInfo)]),
    "wb_exchange_dispatch": (i32, [_handle, _handle, _tensor, _tensor]),
    "wb_exchange_combine": (i32, [_handle, _handle, _tensor, _tensor]),
    "wb_exchange_return_slot_values": (i32, [_handle, _handle, c.c_void_p, c.c_void_p]),
    "wb_permute": (i32, [_handle, _tensor, _tensor, c.POINTER(Stream)]),
    "wb_unpermute_reduce": (i32, [_handle, _tensor, i32, _tensor, c.POINTER(Stream)]),
    "wb_unpermute_reduce_backward": (i32, [_handle, _tensor, i32, _tensor, _tensor, c.c_void_p, c.POINTER(Stream)]),
    "wb_exchange_get_bytes": (i32, [_handle, c.POINTER(ExchangeBytes)]),
    "wb_exchange_get_status": (i32, [_handle, c.POINTER(StepStatus)]),
    "wb_moe_config_init": (i32, [c.POINTER(MoeConfig), u64]),
    "wb_moe_layer_create": (i32, [c.POINTER(MoeConfig), _handle, _handle, _handle, _out]),
    "wb_moe_layer_destroy": (None, [_handle]),
    "wb_moe_step_create": (i32, [_out]),
    "wb_moe_step_destroy": (None, [_handle]),
    "wb_moe_forward_options_init": (i32, [c.POINTER(MoeForwardOptions), u64]),
    "wb_moe_forward": (i32, [_handle, c.POINTER(MoeTensors), _tensor, c.POINTER(MoeForwardOptions), _tensor, _handle]),
    "wb_moe_backward": (i32, [_handle, c.POINTER(MoeTensors), c.POINTER(MoeTensors), _tensor, _tensor, _tensor, _handle, f32]),
    "wb_moe_step_get_info": (i32, [_handle, c.POINTER(MoeStepInfo)]),
    "wb_device_moe_create": (i32, [c.POINTER(MoeConfig), i32, c.POINTER(ProcessGroup), _out]),
    "wb_device_moe_create_local": (i32, [c.POINTER(MoeConfig), i32, c.c_void_p, _out]),
    "wb_device_moe_destroy": (None, [_handle]),
    "wb_device_moe_saved_bytes": (i32, [c.POINTER(MoeConfig), i32, p_i64]),
    "wb_device_moe_forward": (i32, [_handle, c.POINTER(MoeTensors), _tensor, c.POINTER(MoeForwardOptions), c.POINTER(DeviceMoeOutputs), c.POINTER(Stream)]),
    "wb_device_moe_backward": (i32, [_handle, c.POINTER(MoeTensors), c.POINTER(MoeTensors), _tensor, _tensor, _tensor, c.POINTER(MoeForwardOptions), _tensor,
                                     c.c_void_p, c.POINTER(Stream)]),
    "wb_device_exchange_create": (i32, [c.POINTER(ExchangeConfig), i32, c.POINTER(ProcessGroup), _out]),
    "wb_device_exchange_create_local": (i32, [c.POINTER(ExchangeConfig), i32, c.c_void_p, _out]),
    "wb_device_exchange_destroy": (None, [_handle]),
    "wb_device_exchange_dispatch": (i32, [_handle, c.POINTER(Route), _tensor, _tensor, c.c_void_p, c.c_void_p, c.POINTER(Stream)]),
    "wb_device_exchange_combine": (i32, [_handle, c.POINTER(Route), _tensor, i32, _tensor, c.POINTER(Stream)]),
    "wb_device_exchange_combine_backward": (i32, [_handle, c.POINTER(Route), _tensor, _tensor, _tensor, c.c_void_p, c.POINTER(Stream)]),
    "wb_device_exchange_dispatch_start": (i32, [_handle, c.POINTER(Route), _tensor, c.POINTER(Stream)]),
    "wb_device_exchange_dispatch_done": (i32, [_handle, _tensor, c.c_void_p, c.c_void_p, c.POINTER(Stream)]),
    "wb_device_exchange_combine_start": (i32, [_handle, c.POINTER(Route), _tensor, c.POINTER(Stream)]),
    "wb_device_exchange_combine_done": (i32, [_handle, _tensor, c.POINTER(Stream)]),
    "wb_device_moe_get_status": (i32, [_handle, c.POINTER(StepStatus), c.POINTER(Stream)]),
    "wb_update_expert_bias": (i32, [c.c_void_p, c.c_void_p, i64, f32, i32]),
}  # fmt: skip


def sized(struct: type[Any]) -> Any:
    """A zeroed struct with its size set."""
    value = struct()
    value.struct_size = c.sizeof(struct)
    return value
