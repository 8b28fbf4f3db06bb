# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine between the ranks of a group, and the receiver's permute, as differentiable custom ops.

A plan is a tuple of tensors: what travelled is recomputed from them where a compiler or a hook has replaced the token (collectively, so that
the ranks stay in step).
"""

from __future__ import annotations

import ctypes as c
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _abi, _core
from .._library import check, library
from ..config import HIERARCHIES, WIRES, choice
from ..group import Fabric
from . import _slots, _views
from ._slots import Slots


class Plan(NamedTuple):
    """Both sides' plan of one batch, from Exchange.plan.

    row_offsets [P+1] int64: received rows by source rank. expert_offsets [L+1] int32: first slot of each local expert.
    slot_row [S] int32: row of a slot, -1 = padding. slot_weight [S] float32. ids and weights [T, K]: the routes. token: internal.
    """

    row_offsets: Tensor
    expert_offsets: Tensor
    slot_row: Tensor
    slot_weight: Tensor
    ids: Tensor
    weights: Tensor
    token: Tensor


def _exchange(number: int) -> _core.Exchange:
    return _views.lookup(number, "Exchange")


def _handle(exchange: _core.Exchange, ids: Tensor, weights: Tensor, token: Tensor) -> _core.Dispatch:
    dispatch = _views.peek_token(token)
    found = dispatch is not None
    if exchange.fabric.size > 1:
        found = exchange.fabric.all_reduce(int(found)) == exchange.fabric.size
    return dispatch if found else exchange.plan(_views.view(ids, "ids"), _views.view(weights, "weights"))


def _copy(pointer, count: int, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
    result = torch.empty(count, dtype=dtype)
    if count:
        c.memmove(result.data_ptr(), pointer, count * result.element_size())
    return result


@torch.library.custom_op("waybill::plan", mutates_args=())
def _plan(ids: Tensor, weights: Tensor, exchange: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    owner = _exchange(exchange)
    dispatch = owner.plan(_views.view(ids, "ids"), _views.view(weights, "weights"))
    info = dispatch.info()
    return (_copy(info.row_offsets, owner.fabric.size + 1, torch.int64), _copy(info.expert_offsets, info.L + 1, torch.int32),
            _copy(info.slot_row, info.S_padded, torch.int32), _copy(info.slot_weight, info.S_padded, torch.float32), _views.make_token(dispatch))  # fmt: skip


@_plan.register_fake
def _(ids, weights, exchange):  # type: ignore[no-untyped-def]
    owner = _exchange(exchange)
    S = torch.library.get_ctx().new_dynamic_size()
    new = ids.new_empty
    return (new(owner.fabric.size + 1, dtype=torch.int64), new(owner.E // owner.fabric.size + 1, dtype=torch.int32), new(S, dtype=torch.int32),
            new(S, dtype=torch.float32), new(1, dtype=torch.int64))  # fmt: skip


@torch.library.custom_op("waybill::dispatch", mutates_args=())
def _dispatch(x: Tensor, ids: Tensor, weights: Tensor, token: Tensor, exchange: int) -> Tensor:
    owner = _exchange(exchange)
    handle = _handle(owner, ids, weights, token)
    rows = owner.dispatch(handle, _views.view(x, "x"))
    return _copy(rows.data, rows.shape[0] * rows.shape[1], x.dtype).view(rows.shape[0], rows.shape[1])


@_dispatch.register_fake
def _(x, ids, weights, token, exchange):  # type: ignore[no-untyped-def]
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1])


@torch.library.custom_op("waybill::combine", mutates_args=())
def _combine(z: Tensor, ids: Tensor, weights: Tensor, token: Tensor, exchange: int) -> Tensor:
    owner = _exchange(exchange)
    out = torch.empty(ids.shape[0], z.shape[1], dtype=torch.float32)
    owner.combine(_handle(owner, ids, weights, token), _views.view(z, "z"), _views.view(out, "out"))
    return out


@_combine.register_fake
def _(z, ids, weights, token, exchange):  # type: ignore[no-untyped-def]
    return z.new_empty(ids.shape[0], z.shape[1])


@torch.library.custom_op("waybill::permute", mutates_args=())
def _permute(rows: Tensor, slot_row: Tensor, row_offsets: Tensor, ids: Tensor, weights: Tensor, token: Tensor, exchange: int) -> Tensor:
    y = torch.empty(slot_row.shape[0], rows.shape[1], dtype=rows.dtype)
    _handle(_exchange(exchange), ids, weights, token).permute(_views.view(rows, "rows"), _views.view(y, "y"))
    return y


@_permute.register_fake
def _(rows, slot_row, row_offsets, ids, weights, token, exchange):  # type: ignore[no-untyped-def]
    return rows.new_empty(slot_row.shape[0], rows.shape[1])


@torch.library.custom_op("waybill::unpermute", mutates_args=())
def _unpermute(y: Tensor, row_offsets: Tensor, ids: Tensor, weights: Tensor, token: Tensor, exchange: int, weighted: bool) -> Tensor:
    z = torch.empty(int(row_offsets[-1]), y.shape[1], dtype=torch.float32)
    _handle(_exchange(exchange), ids, weights, token).unpermute(_views.view(y, "y"), _views.view(z, "z"), weighted)
    return z


@_unpermute.register_fake
def _(y, row_offsets, ids, weights, token, exchange, weighted):  # type: ignore[no-untyped-def]
    return y.new_empty(torch.library.get_ctx().new_dynamic_size(), y.shape[1], dtype=torch.float32)


@torch.library.custom_op("waybill::unpermute_backward", mutates_args=())
def _unpermute_backward(dz: Tensor, y: Tensor, ids: Tensor, weights: Tensor, token: Tensor, exchange: int, weighted: bool) -> tuple[Tensor, Tensor]:
    """dy [S, H] and the gradient of the routing weights [T, K] (returned to their tokens' rank)."""
    owner = _exchange(exchange)
    handle = _handle(owner, ids, weights, token)
    dy, d_slot = torch.empty_like(y), torch.empty(y.shape[0], dtype=torch.float32)
    handle.unpermute_backward(_views.view(y, "y"), _views.view(dz, "dz"), _views.view(dy, "dy"), _views.view(d_slot, "d_slot"), weighted)
    d_weights = torch.zeros(ids.shape, dtype=torch.float32)
    if weighted:
        owner.return_slot_values(handle, _views.view(d_slot, "d_slot"), _views.view(d_weights, "d_weights"))
    return dy, d_weights


@_unpermute_backward.register_fake
def _(dz, y, ids, weights, token, exchange, weighted):  # type: ignore[no-untyped-def]
    return torch.empty_like(y), ids.new_empty(ids.shape, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*[value for value in inputs if isinstance(value, Tensor)])
    ctx.rest = [value for value in inputs if not isinstance(value, Tensor)]


def _dispatch_backward(ctx, d_rows):  # type: ignore[no-untyped-def]
    x, ids, weights, token = ctx.saved_tensors
    dx = torch.ops.waybill.combine(d_rows.contiguous().to(torch.float32), ids, weights, token, *ctx.rest)
    return dx.to(x.dtype), None, None, None, None


def _combine_backward(ctx, d_out):  # type: ignore[no-untyped-def]
    _, ids, weights, token = ctx.saved_tensors
    return torch.ops.waybill.dispatch(d_out.contiguous(), ids, weights, token, *ctx.rest), None, None, None, None


def _permute_save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    rows, _, row_offsets, ids, weights, token, exchange = inputs
    ctx.save_for_backward(row_offsets, ids, weights, token)
    ctx.rest, ctx.dtype = exchange, rows.dtype


def _permute_backward(ctx, d_y):  # type: ignore[no-untyped-def]
    row_offsets, ids, weights, token = ctx.saved_tensors
    d_rows = torch.ops.waybill.unpermute(d_y.contiguous(), row_offsets, ids, weights, token, ctx.rest, False)
    return d_rows.to(ctx.dtype), None, None, None, None, None, None


def _unpermute_grad(ctx, dz):  # type: ignore[no-untyped-def]
    y, _, ids, weights, token = ctx.saved_tensors
    exchange, weighted = ctx.rest
    dy, d_weights = torch.ops.waybill.unpermute_backward(dz.contiguous(), y, ids, weights, token, exchange, weighted)
    return dy, None, None, d_weights if weighted else None, None, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_save)
_combine.register_autograd(_combine_backward, setup_context=_save)
_permute.register_autograd(_permute_backward, setup_context=_permute_save)
_unpermute.register_autograd(_unpermute_grad, setup_context=_save)


class Exchange:
    """Dispatch and combine on one rank of a group; every method but permute is collective (every rank, one order, a thread each).

    fabric: this rank's end (waybill.Group(P).fabric(rank), or process_group_fabric()). H: row width. E experts, E / P on each rank; K a token.
    alignment: each expert's rows start at a multiple of it. combine_wire: "float32" or "bfloat16". hierarchy: "flat", "two_level", "auto".

        plan = exchange.plan(ids, weights)
        rows = exchange.dispatch(x, plan)             # [R, H], each token once per rank that holds one of its experts
        slots = exchange.permute(rows, plan)          # [S, H], by local expert: the rows of grouped_matmul
        out = exchange.combine(exchange.unpermute(y, plan), plan)   # [T, H] float32

    The same in two steps, on CPU and CUDA tensors, there the only form (ids int16, int32 above 32,768 experts; H a multiple of 8; one process a GPU):

        slots = exchange.dispatch_slots(x, ids, weights)            # rows [S, H] by local expert, group_sizes [L], valid
        out = exchange.combine_slots(y, ids, weights)               # [T, H] float32

    T_max, receive_factor: of CUDA tensors. S = the slot budget of T_max tokens a rank (default: the T of the first call), ceil(receive_factor * T_max * K)
    slots (0: the worst case) and the padding. The first call on a GPU allocates, is collective and cannot be captured; later ones queue on the current
    stream and wait for nothing.
    """

    def __init__(self, fabric: Fabric, *, H: int, E: int, K: int, alignment: int = 1, combine_wire: str = "float32", hierarchy: str = "flat",
                 debug_checks: bool = False, T_max: int = 0, receive_factor: float = 0.0) -> None:  # fmt: skip
        self._core = _core.Exchange(fabric, H=H, E=E, K=K, alignment=alignment, combine_wire=combine_wire, hierarchy=hierarchy, debug_checks=debug_checks)
        self._number = _views.register(self._core)
        self.H, self.E, self.K, self.fabric, self.T_max, self.receive_factor = H, E, K, fabric, T_max, receive_factor
        self._alignment, self._wire, self._hierarchy = alignment, combine_wire, hierarchy
        self._on_device: dict[int, _slots.DeviceExchange] = {}

    def plan(self, ids: Tensor, weights: Tensor) -> Plan:
        """ids [T, K] int16 or int32 (-1 = none), weights [T, K] float32; T may differ between ranks and may be 0."""
        _views.check(ids, "ids", [torch.int16, torch.int32], ["T", self.K])
        _views.check(weights, "weights", [torch.float32], [ids.shape[0], self.K])
        ids, weights = ids.contiguous(), weights.contiguous()
        row_offsets, expert_offsets, slot_row, slot_weight, token = torch.ops.waybill.plan(ids, weights, self._number)
        return Plan(row_offsets, expert_offsets, slot_row, slot_weight, ids, weights, token)

    def dispatch(self, x: Tensor, plan: Plan) -> Tensor:
        """x [T, H] float32 or bfloat16 -> rows [R, H], by source rank then token. Differentiable in x."""
        _views.check(x, "x", _views.FLOATS, [plan.ids.shape[0], self.H])
        return torch.ops.waybill.dispatch(x.contiguous(), plan.ids, plan.weights.detach(), plan.token, self._number)

    def permute(self, rows: Tensor, plan: Plan) -> Tensor:
        """rows [R, H] -> [S, H] by local expert; padding slots are 0. Differentiable in rows."""
        _views.check(rows, "rows", _views.FLOATS, ["R", "H"])
        return torch.ops.waybill.permute(rows.contiguous(), plan.slot_row, plan.row_offsets, plan.ids, plan.weights.detach(), plan.token, self._number)

    def unpermute(self, y: Tensor, plan: Plan, *, weighted: bool = True) -> Tensor:
        """y [S, H] -> z [R, H] float32: each row's slots times their routing weights, summed in order k. Differentiable in y and plan.weights."""
        _views.check(y, "y", _views.FLOATS, [plan.slot_row.shape[0], "H"])
        return torch.ops.waybill.unpermute(y.contiguous(), plan.row_offsets, plan.ids, plan.weights, plan.token, self._number, weighted)

    def combine(self, z: Tensor, plan: Plan) -> Tensor:
        """z [R, H] float32 -> out [T, H] float32: the ranks' partial sums in rank order. Differentiable in z."""
        _views.check(z, "z", [torch.float32], ["R", self.H])
        return torch.ops.waybill.combine(z.contiguous(), plan.ids, plan.weights.detach(), plan.token, self._number)

    def dispatch_slots(self, x: Tensor, ids: Tensor, weights: Tensor) -> Slots:
        """plan, dispatch and permute: x [T, H] float32 or bfloat16, ids [T, K], weights [T, K] float32 -> Slots. Differentiable in x."""
        self._check_routes(ids, weights, x)
        _views.check(x, "x", _views.FLOATS, [ids.shape[0], self.H], on_cuda=True)
        if x.is_cuda:
            number = self._device_number(x, ids)
            return Slots(*torch.ops.waybill.dispatch_cuda(x.contiguous(), ids.contiguous(), weights.detach().contiguous(), number))
        plan = self.plan(ids, weights)
        rows = self.permute(self.dispatch(x, plan), plan)
        return Slots(rows, plan.expert_offsets.diff(), torch.ones((), dtype=torch.int32))

    def combine_slots(self, y: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """unpermute and combine: y [S, H] of the experts -> out [T, H] float32, slots times their weights. ids and weights of dispatch_slots.

        Differentiable in y and weights. On the CPU the batch is planned again."""
        self._check_routes(ids, weights, y)
        _views.check(y, "y", _views.FLOATS, ["S", self.H], on_cuda=True)
        if y.is_cuda:
            return torch.ops.waybill.combine_cuda(y.contiguous(), ids.contiguous(), weights.contiguous(), self._device_number(y, ids), True)
        plan = self.plan(ids, weights)
        return self.combine(self.unpermute(y, plan), plan)

    def _check_routes(self, ids: Tensor, weights: Tensor, like: Tensor) -> None:
        _views.check(ids, "ids", [torch.int16, torch.int32], ["T", self.K], like=like, on_cuda=True)
        _views.check(weights, "weights", [torch.float32], [ids.shape[0], self.K], like=like, on_cuda=True)

    def _device_number(self, x: Tensor, ids: Tensor) -> int:
        own = self._on_device.get(x.device.index)
        if own is None:
            own = self._create_on_device(x.device.index, ids.shape[0])
        if ids.shape[0] > own.T_max:
            raise ValueError(f"x has {ids.shape[0]} rows, this exchange's T_max is {own.T_max}")
        return own.number

    @torch.compiler.disable(recursive=True)
    def _create_on_device(self, device: int, T: int) -> _slots.DeviceExchange:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the first call of an Exchange on a GPU allocates and cannot be captured; run it once before the capture")
        config = _abi.ExchangeConfig()
        check(library().wb_exchange_config_init(c.byref(config), c.sizeof(config)))
        config.H, config.E, config.K, config.T_max, config.alignment = self.H, self.E, self.K, max(self.T_max or T, 1), self._alignment
        config.receive_factor, config.mode, config.combine_wire = self.receive_factor, 1, choice(self._wire, WIRES, "combine_wire")
        config.hierarchy = choice(self._hierarchy, HIERARCHIES, "hierarchy")
        own = self._on_device[device] = _slots.DeviceExchange(config, self.fabric, device)
        return own

    def bytes_sent(self) -> dict[str, int]:
        """Bytes this rank has sent to other ranks so far, by kind."""
        return self._core.bytes_sent()
