# SPDX-License-Identifier: Apache-2.0
"""Dispatch straight to expert slots, and combine from them: on CPU tensors the steps of _exchange.py, on CUDA tensors one custom op each, of a fixed budget."""

from __future__ import annotations

import ctypes as c
import os
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _abi, _core, _device
from .._library import check, library
from ..group import Fabric
from . import _views


class Slots(NamedTuple):
    """rows [S, H] by local expert, 0 where no route is; group_sizes [L] int32 (with alignment padding): rows of each local expert; valid: int32
    scalar, 0 after an overflow of the slot budget on any rank (everything is 0 then: skip the update)."""

    rows: Tensor
    group_sizes: Tensor
    valid: Tensor


class DeviceExchange(_core.Handle):
    """Owner of a wb_device_exchange. Creation is collective over the fabric, and waits for the device."""

    _destroy = "wb_device_exchange_destroy"

    def __init__(self, struct: _abi.ExchangeConfig, fabric: Fabric, device: int) -> None:
        super().__init__()
        self.struct, self.fabric, self.device = struct, fabric, device
        self.E, self.L, self.T_max = struct.E, struct.E // fabric.size, struct.T_max
        self.num_slots = _device.num_slots(struct, fabric.size)
        peers = _device.Peers(fabric.rank, fabric.size, os.environ.get("MASTER_ADDR", "127.0.0.1"), fabric.all_reduce)
        with _device.group_of(peers, device) as group:
            check(library().wb_device_exchange_create(c.byref(struct), device, group, c.byref(self.handle)))
        self.number = _views.register(self)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # CUDA and the peers may be gone
            super().__del__()

    def route(self, ids: Tensor, weights: Tensor) -> Any:
        route = _abi.Route(struct_size=c.sizeof(_abi.Route), T=ids.shape[0], K=ids.shape[1], E=self.E, id_dtype=_views.DTYPES[ids.dtype], device_type=1,
                           device_index=self.device, ids=ids.data_ptr(), weights=c.cast(weights.data_ptr(), _abi.p_f32))  # fmt: skip
        return c.byref(route)

    def stream(self) -> Any:
        return c.byref(_core.cuda_stream(self.device, torch._C._cuda_getCurrentRawStream(self.device)))


def _owner(number: int) -> DeviceExchange:
    return _views.lookup(number, "Exchange")


def _see(tensor: Tensor, name: str) -> Any:
    return c.byref(_views.view(tensor, name).struct)


@torch.library.custom_op("waybill::dispatch_cuda", mutates_args=(), device_types="cuda")
def _dispatch(x: Tensor, ids: Tensor, weights: Tensor, exchange: int) -> tuple[Tensor, Tensor, Tensor]:
    own = _owner(exchange)
    rows, sizes, valid = x.new_empty(own.num_slots, x.shape[1]), ids.new_empty(own.L, dtype=torch.int32), ids.new_empty((), dtype=torch.int32)
    check(library().wb_device_exchange_dispatch(own.handle, own.route(ids, weights), _see(x, "x"), _see(rows, "rows"), sizes.data_ptr(), valid.data_ptr(),
                                                own.stream()))  # fmt: skip
    return rows, sizes, valid


@_dispatch.register_fake
def _(x, ids, weights, exchange):  # type: ignore[no-untyped-def]
    own = _owner(exchange)
    return x.new_empty(own.num_slots, x.shape[1]), ids.new_empty(own.L, dtype=torch.int32), ids.new_empty((), dtype=torch.int32)


@torch.library.custom_op("waybill::combine_cuda", mutates_args=(), device_types="cuda")
def _combine(y: Tensor, ids: Tensor, weights: Tensor, exchange: int, weighted: bool) -> Tensor:
    own, out = _owner(exchange), y.new_empty(ids.shape[0], y.shape[1], dtype=torch.float32)
    check(library().wb_device_exchange_combine(own.handle, own.route(ids, weights), _see(y, "y"), weighted, _see(out, "out"), own.stream()))
    return out


@_combine.register_fake
def _(y, ids, weights, exchange, weighted):  # type: ignore[no-untyped-def]
    return y.new_empty(ids.shape[0], y.shape[1], dtype=torch.float32)


@torch.library.custom_op("waybill::combine_cuda_backward", mutates_args=(), device_types="cuda")
def _combine_gradient(d_out: Tensor, y: Tensor, ids: Tensor, weights: Tensor, exchange: int) -> tuple[Tensor, Tensor]:
    own, dy, d_weights = _owner(exchange), torch.empty_like(y), torch.empty_like(weights)
    check(library().wb_device_exchange_combine_backward(own.handle, own.route(ids, weights), _see(d_out, "d_out"), _see(y, "y"), _see(dy, "dy"),
                                                        d_weights.data_ptr(), own.stream()))  # fmt: skip
    return dy, d_weights


@_combine_gradient.register_fake
def _(d_out, y, ids, weights, exchange):  # type: ignore[no-untyped-def]
    return torch.empty_like(y), torch.empty_like(weights)


def _save_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    x, ids, weights, ctx.exchange = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtype = x.dtype
    ctx.save_for_backward(ids, weights)


def _dispatch_backward(ctx: Any, d_rows: Any, *_: Any) -> Any:
    ids, weights = ctx.saved_tensors
    return torch.ops.waybill.combine_cuda(d_rows.contiguous(), ids, weights, ctx.exchange, False).to(ctx.dtype), None, None, None


def _save_combine(ctx: Any, inputs: Any, output: Any) -> None:
    y, ids, weights, ctx.exchange, ctx.weighted = inputs
    ctx.save_for_backward(y, ids, weights)


def _combine_backward(ctx: Any, d_out: Any) -> Any:
    y, ids, weights = ctx.saved_tensors
    if not ctx.weighted:
        raise NotImplementedError("the second derivative of dispatch")
    dy, d_weights = torch.ops.waybill.combine_cuda_backward(d_out.contiguous(), y, ids, weights, ctx.exchange)
    return dy, None, d_weights, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
_combine.register_autograd(_combine_backward, setup_context=_save_combine)
