# SPDX-License-Identifier: Apache-2.0
"""The whole MoE block as one custom op with one backward op."""

from __future__ import annotations

import ctypes as c
from typing import Any, Optional

import torch
from torch import Tensor

from .. import _abi, _core
from ..config import MoeConfig
from ..group import Fabric
from . import _views

NAMES = _abi.MOE_TENSORS


class Layer:
    """A layer's handle and its spare steps: a step's memory is used again by a later forward."""

    def __init__(self, config: MoeConfig, ep: Fabric, world: Fabric | None) -> None:
        self.core = _core.MoeLayer(config, ep, world)
        self.config, self.world = config, self.core.world
        self.number = _views.register(self)
        self._spare: list[_core.MoeStep] = []
        self.calls: Any = None  # of _eager.py

    def take(self) -> _core.MoeStep:
        try:
            return self._spare.pop()
        except IndexError:
            return _core.MoeStep()

    def give_back(self, step: _core.MoeStep) -> None:
        self._spare.append(step)


def _layer(number: int) -> Layer:
    return _views.lookup(number, "MoE layer")


def _wide(tensor: Tensor) -> Tensor:
    """The layer computes in float32; narrower arrays are widened."""
    return tensor.to(torch.float32).contiguous()


def _given(names: str) -> list[str]:
    return names.split(",")


def _parameters(tensors: list[Tensor], names: str) -> tuple[_abi.MoeTensors, list[Tensor]]:
    """The struct, and the tensors that keep its memory."""
    wide = [_wide(tensor) for tensor in tensors]
    return _core.moe_tensors({name: _views.view(tensor, name) for name, tensor in zip(_given(names), wide)}), wide


def _mask_view(mask: Optional[Tensor]) -> _views.View | None:
    return _views.optional_view(mask, "padding_mask")


def _seed(seed: Optional[Tensor]) -> int:
    return 0 if seed is None else int(seed) & (2**64 - 1)


# save: backward may follow. The loss is this rank's share of all losses together; the sum over ranks is the loss.
# stats: float64 [auxiliary, sequence, global, z, valid, slot demand, slot capacity, slots, rows, flags].
NUM_STATS = 10


@torch.library.custom_op("waybill::moe", mutates_args=())
def _moe(x: Tensor, parameters: list[Tensor], padding_mask: Optional[Tensor], seed: Optional[Tensor], names: str, layer: int,
         save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    owner = _layer(layer)
    structs, keep = _parameters(parameters, names)
    wide = _wide(x)
    out = torch.empty_like(wide)
    step = owner.take()
    owner.core.forward(structs, _views.view(wide, "x"), _views.view(out, "out"), step, training=save, padding_mask=_mask_view(padding_mask),
                       rounding_seed=_seed(seed))  # fmt: skip
    info = step.info()
    T, K = x.shape[0], owner.config.router.K
    ids = torch.empty(T, K, dtype=torch.int16 if info.route.id_dtype == _abi.I16 else torch.int32)
    weights = torch.empty(T, K, dtype=torch.float32)
    counts = torch.empty(info.E, dtype=torch.int64)
    if T:
        c.memmove(ids.data_ptr(), info.route.ids, ids.numel() * ids.element_size())
        c.memmove(weights.data_ptr(), info.route.weights, weights.numel() * 4)
    c.memmove(counts.data_ptr(), info.expert_counts, info.E * 8)
    status = info.status
    stats = torch.tensor([info.aux, info.sequence, info.global_loss, info.z, info.valid, status.slot_demand, status.slot_capacity, info.slots, info.rows,
                          status.flags], dtype=torch.float64)  # fmt: skip
    loss = stats[:4].sum().to(torch.float32)
    if save:
        token = _views.make_token(step, owner.give_back)
    else:
        token = torch.zeros(1, dtype=torch.int64)
        owner.give_back(step)
    return out.to(x.dtype), loss, ids, weights, counts, stats, token


@_moe.register_fake
def _(x, parameters, padding_mask, seed, names, layer, save):  # type: ignore[no-untyped-def]
    config = _layer(layer).config
    T, router = x.shape[0], config.router
    new = x.new_empty
    id_dtype = torch.int16 if router.E <= 32768 else torch.int32
    return (torch.empty_like(x), new((), dtype=torch.float32), new(T, router.K, dtype=id_dtype), new(T, router.K, dtype=torch.float32),
            new(router.E, dtype=torch.int64), new(NUM_STATS, dtype=torch.float64), new(1, dtype=torch.int64))  # fmt: skip


@torch.library.custom_op("waybill::moe_backward", mutates_args=())
def _moe_backward(d_out: Tensor, d_loss: Tensor, x: Tensor, parameters: list[Tensor], padding_mask: Optional[Tensor], seed: Optional[Tensor],
                  ids: Tensor, weights: Tensor, token: Tensor, names: str, layer: int) -> list[Tensor]:  # fmt: skip
    owner = _layer(layer)
    structs, keep = _parameters(parameters, names)
    wide = _wide(x)
    x_view = _views.view(wide, "x")
    step = _views.take_token(token)
    found = step is not None
    if owner.world.size > 1:  # the forward below is collective: all ranks make it, or none
        found = owner.world.all_reduce(int(found)) == owner.world.size
    if not found:  # a second backward, or a hook that replaced the token: the same routes again
        step = step or owner.take()
        scratch = torch.empty_like(wide)
        replay = _core.route_struct(owner.config.router.E, _views.view(ids, "ids"), _views.view(weights, "weights"))
        owner.core.forward(structs, x_view, _views.view(scratch, "out"), step, padding_mask=_mask_view(padding_mask), replay=replay,
                           rounding_seed=_seed(seed))  # fmt: skip
    gradients = {name: torch.zeros_like(tensor) for name, tensor in zip(_given(names), keep) if name != "router_bias"}
    gradient_structs = _core.moe_tensors({name: _views.view(tensor, name) for name, tensor in gradients.items()})
    dx, wide_out = torch.empty_like(wide), _wide(d_out)
    owner.core.backward(structs, gradient_structs, x_view, _views.view(wide_out, "d_out"), _views.view(dx, "dx"), step, float(d_loss))
    owner.give_back(step)
    narrow = [gradients[name].to(tensor.dtype) for name, tensor in zip(_given(names), parameters) if name in gradients]
    return [dx.to(x.dtype), *narrow]


@_moe_backward.register_fake
def _(d_out, d_loss, x, parameters, padding_mask, seed, ids, weights, token, names, layer):  # type: ignore[no-untyped-def]
    given = [tensor for name, tensor in zip(_given(names), parameters) if name != "router_bias"]
    return [torch.empty_like(x)] + [torch.empty_like(tensor) for tensor in given]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, parameters, padding_mask, seed, ctx.names, ctx.layer, ctx.save = inputs
    _, _, ids, weights, counts, stats, token = output
    ctx.mark_non_differentiable(ids, weights, counts, stats, token)
    ctx.has_mask, ctx.has_seed = padding_mask is not None, seed is not None
    optional = [tensor for tensor in [padding_mask, seed, *parameters] if tensor is not None]
    ctx.save_for_backward(x, ids, weights, token, *optional)


def _backward(ctx: Any, d_out: Any, d_loss: Any, *_: Any) -> Any:
    if not ctx.save:
        raise RuntimeError("backward of an MoE block that ran without saving; run its forward with gradients enabled")
    x, ids, weights, token, *rest = ctx.saved_tensors
    mask = rest.pop(0) if ctx.has_mask else None
    seed = rest.pop(0) if ctx.has_seed else None
    d_out = torch.zeros_like(x) if d_out is None else d_out
    d_loss = torch.zeros(()) if d_loss is None else d_loss
    dx, *gradients = torch.ops.waybill.moe_backward(d_out.contiguous(), d_loss, x, rest, mask, seed, ids, weights, token, ctx.names, ctx.layer)
    spread = [None if name == "router_bias" else gradients.pop(0) for name in _given(ctx.names)]
    return dx, spread, None, None, None, None, None


_moe.register_autograd(_backward, setup_context=_setup)
