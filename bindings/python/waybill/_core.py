# SPDX-License-Identifier: Apache-2.0
"""Handles and calls of the C ABI on checked views; what waybill.torch and the plain-array API share."""

from __future__ import annotations

import ctypes as c
import functools
from typing import Any

from . import _abi
from ._library import check, library
from ._tensor import View
from .config import MODES, WIRES, HIERARCHIES, MoeConfig, RouterConfig, choice
from .group import Fabric

_NONE = _abi.Tensor()  # rank 0: not given


def _struct(view: View | None) -> _abi.Tensor:
    return _NONE if view is None else view.struct


def _ref(view: View | None) -> Any:
    return None if view is None else c.byref(view.struct)


def _data(view: View | None) -> Any:
    return None if view is None else view.struct.data


def _i32_pointer(view: View | None) -> Any:
    return c.cast(view.struct.data, _abi.p_i32) if view is not None else None


def cuda_stream(device: int, native: int) -> _abi.Stream:
    """A stream of a CUDA device; native: its cudaStream_t as a number, 0 = the default stream."""
    return _abi.Stream(struct_size=c.sizeof(_abi.Stream), device_type=1, device_index=device, native=native or None)


def _stream_ref(stream: _abi.Stream | None) -> Any:
    return None if stream is None else c.byref(stream)


def route_struct(E: int, ids: View, weights: View, counts: View | None = None) -> _abi.Route:
    """ids [T, K] int16 or int32, weights [T, K] float32, counts [E] int32."""
    T, K = ids.shape
    return _abi.Route(struct_size=c.sizeof(_abi.Route), T=T, K=K, E=E, id_dtype=ids.struct.dtype, ids=ids.struct.data,
                      device_type=ids.struct.device_type, device_index=ids.struct.device_index,
                      weights=c.cast(weights.struct.data, _abi.p_f32), counts=_i32_pointer(counts))  # fmt: skip


class RouterCall:
    """The inputs of one batch; forward, losses and backward read the same ones. stream: of a call with memory of a CUDA device."""

    def __init__(self, config: RouterConfig | _abi.RouterConfig, logits: View, *, bias: View | None = None, padding_mask: View | None = None,
                 expert_mask: View | None = None, replay_ids: View | None = None, token_offset: int = 0, aux_counts: View | None = None,
                 aux_tokens: float = 0, loss_tokens: float = 0, num_sequences: float = 0, stream: _abi.Stream | None = None) -> None:  # fmt: skip
        self.config = config.struct() if isinstance(config, RouterConfig) else config
        self._stream = stream
        self._keep = (logits, bias, padding_mask, expert_mask, replay_ids, aux_counts)  # the structs hold addresses only
        self.inputs = _abi.RouterInputs(
            struct_size=c.sizeof(_abi.RouterInputs), logits=logits.struct, expert_bias=_struct(bias), expert_mask=_struct(expert_mask),
            padding_mask=_struct(padding_mask), replay_ids=_struct(replay_ids), token_offset=token_offset, aux_counts=_i32_pointer(aux_counts),
            aux_tokens=aux_tokens, loss_tokens=loss_tokens, num_sequences=num_sequences)  # fmt: skip

    def forward(self, ids: View, weights: View, counts: View | None = None) -> _abi.StepStatus | None:
        """None on a device, where the status is not waited for."""
        if self._stream is not None:
            outputs = _abi.RouterOutputs(struct_size=c.sizeof(_abi.RouterOutputs), route=route_struct(self.config.E, ids, weights, counts))
            check(library().wb_router_forward(c.byref(self.config), c.byref(self.inputs), c.byref(outputs), c.byref(self._stream)))
            return None
        status = _abi.StepStatus()
        check(library().wb_step_status_init(c.byref(status), c.sizeof(status)))
        outputs = _abi.RouterOutputs(
            struct_size=c.sizeof(_abi.RouterOutputs), route=route_struct(self.config.E, ids, weights, counts), status=c.pointer(status)
        )
        check(library().wb_router_forward(c.byref(self.config), c.byref(self.inputs), c.byref(outputs), None))
        return status

    def losses(self, ids: View, weights: View) -> tuple[float, float, float]:
        values = (c.c_double * 3)()
        route = route_struct(self.config.E, ids, weights)
        check(library().wb_router_losses(c.byref(self.config), c.byref(self.inputs), c.byref(route), values, None))
        return tuple(values)  # type: ignore[return-value]

    def losses_weighted(self, ids: View, weights: View, loss_weights: View | None, losses: View) -> None:
        """losses [3] float32 = loss_weights [3] float32 (None: 1) times the losses; all in the memory of the logits. Does not wait."""
        route = route_struct(self.config.E, ids, weights)
        check(library().wb_router_losses_weighted(c.byref(self.config), c.byref(self.inputs), c.byref(route), _data(loss_weights), losses.struct.data,
                                                  _stream_ref(self._stream)))  # fmt: skip

    def backward(self, ids: View, weights: View, d_weights: View, d_logits: View, loss_weights: View | None = None) -> None:
        """loss_weights [3] float32 in the memory of the logits multiply the coefficients."""
        route = route_struct(self.config.E, ids, weights)
        check(library().wb_router_backward_weighted(c.byref(self.config), c.byref(self.inputs), c.byref(route), d_weights.struct.data, _data(loss_weights),
                                                    _ref(d_logits), _stream_ref(self._stream)))  # fmt: skip


_GEMMS = {"forward": "wb_grouped_gemm", "dgrad": "wb_grouped_gemm_dgrad", "wgrad": "wb_grouped_gemm_wgrad"}


def grouped_gemm(product: str, a: View, weights: View, offsets: View, y: View, *, lcn: bool = False, bias: View | None = None,
                 a_rows: View | None = None, accumulate: bool = False, stream: _abi.Stream | None = None) -> None:  # fmt: skip
    """product: "forward" writes y, "dgrad" writes a, "wgrad" writes weights (and bias)."""
    args = _abi.GroupedGemmArgs(struct_size=c.sizeof(_abi.GroupedGemmArgs), a=a.struct, weights=weights.struct, offsets=offsets.struct, y=y.struct,
                                a_rows=_struct(a_rows), bias=_struct(bias), weights_are_lcn=lcn, accumulate=accumulate)  # fmt: skip
    check(getattr(library(), _GEMMS[product])(c.byref(args), _stream_ref(stream)))


def group_rows(offsets: View, rows: View | None, S: int, sizes: View | None = None, stream: _abi.Stream | None = None) -> None:
    """offsets [L + 1] from sizes [L] where these are given; rows [S, *] past the last group become zero."""
    check(library().wb_group_rows(_ref(sizes), _ref(offsets), _ref(rows), S, _stream_ref(stream)))


def quant_config(**settings: Any) -> _abi.QuantConfig:
    config = _abi.QuantConfig()
    check(library().wb_quant_config_init(c.byref(config), c.sizeof(config)))
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def quantize(config: _abi.QuantConfig, x: View, codes: View, scales: View, offsets: View | None = None, group_scales: View | None = None,
             stream: _abi.Stream | None = None) -> None:  # fmt: skip
    out = _abi.Quantized(struct_size=c.sizeof(_abi.Quantized), codes=codes.struct, scales=scales.struct, group_scales=_struct(group_scales))
    check(library().wb_quantize(c.byref(config), _ref(x), _ref(offsets), c.byref(out), _stream_ref(stream)))


def quantize_activated(config: _abi.QuantConfig, h: View, codes: View, scales: View, *, activation: int = 0, limit: float | None = None,
                       alpha: float | None = None, weight: View | None = None, da: View | None = None, d_weight: View | None = None,
                       partial_sums: View | None = None, wide: View | None = None, offsets: View | None = None, group_scales: View | None = None,
                       stream: _abi.Stream | None = None) -> None:  # fmt: skip
    """Codes of weight * act(h) or, where da is given, of the gradient of h (waybill/quantize_activated.h). activation: 0 SwiGLU, 1 clamped, 2 ReLU^2.

    limit, alpha: of clamped SwiGLU, None = the library's."""
    x = _abi.ActivatedRows()
    check(library().wb_activated_rows_init(c.byref(x), c.sizeof(x)))
    x.activation, x.h, x.weight, x.da, x.d_weight = activation, h.struct, _struct(weight), _struct(da), _struct(d_weight)
    x.partial_sums, x.wide = _struct(partial_sums), _struct(wide)
    x.activation_limit = x.activation_limit if limit is None else limit
    x.activation_alpha = x.activation_alpha if alpha is None else alpha
    out = _abi.Quantized(struct_size=c.sizeof(_abi.Quantized), codes=codes.struct, scales=scales.struct, group_scales=_struct(group_scales))
    check(library().wb_quantize_activated(c.byref(config), c.byref(x), _ref(offsets), c.byref(out), _stream_ref(stream)))


def dequantize(config: _abi.QuantConfig, codes: View, scales: View, y: View, offsets: View | None = None, group_scales: View | None = None,
               stream: _abi.Stream | None = None) -> None:  # fmt: skip
    given = _abi.Quantized(struct_size=c.sizeof(_abi.Quantized), codes=codes.struct, scales=scales.struct, group_scales=_struct(group_scales))
    check(library().wb_dequantize(c.byref(config), c.byref(given), _ref(offsets), _ref(y), _stream_ref(stream)))


class Handle:
    """Owner of an opaque handle: destroyed once, with this object."""

    _destroy = ""

    def __init__(self) -> None:
        self.handle = c.c_void_p()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            getattr(library(), self._destroy)(self.handle)
            self.handle = c.c_void_p()


class Dispatch(Handle):
    """Plan of one batch and, after Exchange.dispatch, the rows it received. Its arrays are borrowed views."""

    _destroy = "wb_dispatch_destroy"

    def info(self) -> _abi.DispatchInfo:
        info = _abi.DispatchInfo(struct_size=c.sizeof(_abi.DispatchInfo))
        check(library().wb_dispatch_get_info(self.handle, c.byref(info)))
        return info

    def permute(self, rows: View, y: View) -> None:
        check(library().wb_permute(self.handle, _ref(rows), _ref(y), None))

    def unpermute(self, y: View, z: View, weighted: bool) -> None:
        check(library().wb_unpermute_reduce(self.handle, _ref(y), weighted, _ref(z), None))

    def unpermute_backward(self, y: View | None, dz: View, dy: View, d_weight: View | None, weighted: bool) -> None:
        data = None if d_weight is None else d_weight.struct.data
        check(library().wb_unpermute_reduce_backward(self.handle, _ref(y), weighted, _ref(dz), _ref(dy), data, None))


class Exchange(Handle):
    """Dispatch and combine of one rank. Creation and every call but get_* is collective."""

    _destroy = "wb_exchange_destroy"

    def __init__(self, fabric: Fabric, *, H: int, E: int, K: int, mode: str = "eager", T_max: int = 0, receive_factor: float = 0.0, alignment: int = 1,
                 combine_wire: str = "float32", hierarchy: str = "flat", debug_checks: bool = False) -> None:  # fmt: skip
        super().__init__()
        config = _abi.ExchangeConfig()
        check(library().wb_exchange_config_init(c.byref(config), c.sizeof(config)))
        config.H, config.E, config.K, config.T_max, config.alignment = H, E, K, T_max, alignment
        config.receive_factor, config.debug_checks = receive_factor, debug_checks
        config.mode, config.combine_wire = choice(mode, MODES, "mode"), choice(combine_wire, WIRES, "combine_wire")
        config.hierarchy = choice(hierarchy, HIERARCHIES, "hierarchy")
        check(library().wb_exchange_create(c.byref(config), fabric.handle, c.byref(self.handle)))
        self.fabric, self.H, self.E, self.K = fabric, H, E, K

    def plan(self, ids: View, weights: View) -> Dispatch:
        dispatch = Dispatch()
        route = route_struct(self.E, ids, weights)
        check(library().wb_exchange_plan(self.handle, c.byref(route), c.byref(dispatch.handle)))
        return dispatch

    def dispatch(self, plan: Dispatch, x: View) -> _abi.Tensor:
        """x [T, H] -> rows [R, H], borrowed from `plan` until its next dispatch."""
        rows = _abi.Tensor()
        check(library().wb_exchange_dispatch(self.handle, plan.handle, _ref(x), c.byref(rows)))
        return rows

    def combine(self, plan: Dispatch, z: View, out: View) -> None:
        check(library().wb_exchange_combine(self.handle, plan.handle, _ref(z), _ref(out)))

    def return_slot_values(self, plan: Dispatch, values: View, d_weights: View) -> None:
        check(library().wb_exchange_return_slot_values(self.handle, plan.handle, values.struct.data, d_weights.struct.data))

    def bytes_sent(self) -> dict[str, int]:
        sent = _abi.ExchangeBytes(struct_size=c.sizeof(_abi.ExchangeBytes))
        check(library().wb_exchange_get_bytes(self.handle, c.byref(sent)))
        return {name: getattr(sent, name) for name, *_ in _abi.ExchangeBytes._fields_[1:]}

    def status(self) -> _abi.StepStatus:
        status = _abi.StepStatus(struct_size=c.sizeof(_abi.StepStatus))
        check(library().wb_exchange_get_status(self.handle, c.byref(status)))
        return status


class MoeStep(Handle):
    """What one forward keeps for its backward."""

    _destroy = "wb_moe_step_destroy"

    def __init__(self) -> None:
        super().__init__()
        check(library().wb_moe_step_create(c.byref(self.handle)))

    def info(self) -> _abi.MoeStepInfo:
        info = _abi.MoeStepInfo(struct_size=c.sizeof(_abi.MoeStepInfo))
        check(library().wb_moe_step_get_info(self.handle, c.byref(info)))
        return info


def moe_tensors(views: dict[str, View | None]) -> _abi.MoeTensors:
    result = _abi.MoeTensors(struct_size=c.sizeof(_abi.MoeTensors))
    for name, view in views.items():
        if view is not None:
            setattr(result, name, view.struct)
    return result


def _compare_configs(struct: _abi.MoeConfig, ep: Fabric) -> None:
    """Refuses configs that differ between the ranks, on every rank, naming the setting. (The library compares those of the exchange.)"""
    if ep.size == 1:
        return
    words = c.sizeof(struct) // 8
    everyone = (c.c_int64 * (words * ep.size))()
    c.memmove(c.byref(everyone, ep.rank * words * 8), c.byref(struct), c.sizeof(struct))
    # A sum with zeros from everybody else is a gather.
    check(library().wb_fabric_all_reduce_i64(ep.handle, everyone, len(everyone)))
    size = c.sizeof(struct)
    name_difference(_abi.MoeConfig, [bytes(everyone)[rank * size : (rank + 1) * size] for rank in range(ep.size)])


def name_difference(kind: type[Any], everyone: list[bytes]) -> None:
    """ValueError with setting and values where the config structs of all ranks, as bytes, are not one. kind: _abi.MoeConfig or ExchangeConfig."""
    what = "MoE" if kind is _abi.MoeConfig else "exchange"
    for rank, given in enumerate(everyone):
        if len(given) != c.sizeof(kind):
            raise ValueError(f"rank {rank} has another version of Waybill: its {what} config has {len(given)} bytes, here {c.sizeof(kind)}")
    first = _flat(kind.from_buffer_copy(everyone[0]))
    for rank, given in enumerate(everyone):
        other = _flat(kind.from_buffer_copy(given))
        for name, value in first.items():
            if other[name] != value:
                raise ValueError(f"{what} configs differ between ranks: rank 0 has {name} = {value}, rank {rank} has {other[name]}")


def _flat(struct: Any) -> dict[str, float]:
    values = {name: getattr(struct, name) for name, *_ in struct._fields_}
    router = values.pop("router", None)
    return values | ({} if router is None else {f"router.{name}": getattr(router, name) for name, *_ in router._fields_})


@functools.cache
def check_router(config: RouterConfig) -> None:
    """ValueError, with the library's text, of a config that no router takes."""
    one = c.c_int32()
    empty = _abi.Tensor(data=c.addressof(one), dtype=_abi.F32, rank=2)
    empty.shape[1] = config.E
    route = _abi.Route(struct_size=c.sizeof(_abi.Route), T=0, K=config.K, E=config.E, id_dtype=_abi.I32)
    inputs = _abi.RouterInputs(struct_size=c.sizeof(_abi.RouterInputs), logits=empty)
    outputs = _abi.RouterOutputs(struct_size=c.sizeof(_abi.RouterOutputs), route=route)
    check(library().wb_router_forward(c.byref(config.struct()), c.byref(inputs), c.byref(outputs), None))


class MoeLayer(Handle):
    """The whole block on one rank. Creation, forward and backward are collective over ep."""

    _destroy = "wb_moe_layer_destroy"

    def __init__(self, config: MoeConfig, ep: Fabric, world: Fabric | None = None) -> None:
        super().__init__()
        struct = config.struct()
        _compare_configs(struct, ep)
        check(library().wb_moe_layer_create(c.byref(struct), ep.handle, (world or ep).handle, None, c.byref(self.handle)))
        self.config, self.ep, self.world = config, ep, world or ep

    def forward(self, parameters: _abi.MoeTensors, x: View, out: View, step: MoeStep, *, training: bool = True, padding_mask: View | None = None,
                replay: _abi.Route | None = None, rounding_seed: int = 0) -> None:  # fmt: skip
        options = _abi.MoeForwardOptions()
        check(library().wb_moe_forward_options_init(c.byref(options), c.sizeof(options)))
        options.training, options.padding_mask, options.rounding_seed = training, _struct(padding_mask), rounding_seed
        if replay is not None:
            options.replay = c.pointer(replay)
        check(library().wb_moe_forward(self.handle, c.byref(parameters), _ref(x), c.byref(options), _ref(out), step.handle))

    def backward(self, parameters: _abi.MoeTensors, gradients: _abi.MoeTensors, x: View, d_out: View, dx: View, step: MoeStep, loss_scale: float) -> None:
        """Gradients are added to; dx is written."""
        check(library().wb_moe_backward(self.handle, c.byref(parameters), c.byref(gradients), _ref(x), _ref(d_out), _ref(dx), step.handle, loss_scale))
