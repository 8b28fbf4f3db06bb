# SPDX-License-Identifier: Apache-2.0
"""The router as a custom op: logits [T, E] -> compact routes [T, K], with the exact backward of weights and losses."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import _core
from ..config import RouterConfig
from ..group import Fabric
from . import _views

_LOGITS = (torch.float32, torch.bfloat16, torch.float16)


class Routes(NamedTuple):
    """ids [T, K] int16 (int32 above 32,768 experts; -1 = none), weights [T, K] float32, counts [E] int32 of this call, losses [3] float32:
    auxiliary, sequence and z loss, coefficients included, this rank's share (the sum over ranks is the loss)."""

    ids: Tensor
    weights: Tensor
    counts: Tensor
    losses: Tensor


@functools.cache
def _config(text: str) -> RouterConfig:
    return RouterConfig(**json.loads(text))


def _id_dtype(E: int) -> torch.dtype:
    return torch.int16 if E <= 32768 else torch.int32


def _call(config: RouterConfig, logits: Tensor, bias: Optional[Tensor], padding_mask: Optional[Tensor], totals: Optional[Tensor] = None,
          scales: Optional[Tensor] = None) -> _core.RouterCall:  # fmt: skip
    struct = config.struct()
    options = {}
    if totals is not None:  # [E + 1] int64: counts over all ranks, then valid tokens
        tokens = float(totals[-1])
        counts = totals[:-1].to(torch.int32)
        options = {"aux_counts": _views.view(counts, "counts"), "aux_tokens": tokens, "loss_tokens": tokens}
    if scales is not None:
        struct.aux_coefficient *= float(scales[0])
        struct.sequence_coefficient *= float(scales[1])
        struct.z_coefficient *= float(scales[2])
    return _core.RouterCall(struct, _views.view(logits, "logits"), bias=_views.optional_view(bias, "bias"),
                            padding_mask=_views.optional_view(padding_mask, "padding_mask"), **options)  # fmt: skip


@torch.library.custom_op("waybill::router", mutates_args=())
def _router(logits: Tensor, bias: Optional[Tensor], padding_mask: Optional[Tensor], config: str, fabric: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    settings = _config(config)
    T, E = logits.shape
    ids = torch.empty(T, settings.K, dtype=_id_dtype(E))
    weights = torch.empty(T, settings.K, dtype=torch.float32)
    counts = torch.empty(E, dtype=torch.int32)
    call = _call(settings, logits, bias, padding_mask)
    ids_view, weights_view = _views.view(ids, "ids"), _views.view(weights, "weights")
    call.forward(ids_view, weights_view, _views.view(counts, "counts"))
    tokens = T if padding_mask is None else int((padding_mask == 0).sum())
    totals = torch.cat([counts.to(torch.int64), torch.tensor([tokens])])
    if fabric:
        _all_reduce(_views.lookup(fabric, "fabric"), totals)
    losses = torch.zeros(3)
    if settings.aux_coefficient or settings.sequence_coefficient or settings.z_coefficient:
        losses = torch.tensor(_call(settings, logits, bias, padding_mask, totals).losses(ids_view, weights_view), dtype=torch.float32)
    return ids, weights, counts, losses, totals


def _all_reduce(fabric: Fabric, values: Tensor) -> None:
    from .._library import check, library

    check(library().wb_fabric_all_reduce_i64(fabric.handle, values.data_ptr(), values.numel()))


@_router.register_fake
def _(logits: Tensor, bias: Optional[Tensor], padding_mask: Optional[Tensor], config: str, fabric: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    T, E = logits.shape
    K = _config(config).K
    new = logits.new_empty
    return (new(T, K, dtype=_id_dtype(_config(config).E)), new(T, K, dtype=torch.float32), new(E, dtype=torch.int32), new(3, dtype=torch.float32),
            new(E + 1, dtype=torch.int64))  # fmt: skip


@torch.library.custom_op("waybill::router_backward", mutates_args=())
def _router_backward(logits: Tensor, bias: Optional[Tensor], padding_mask: Optional[Tensor], ids: Tensor, weights: Tensor, totals: Tensor, d_weights: Tensor,
                     d_losses: Tensor, config: str) -> Tensor:  # fmt: skip
    d_logits = torch.empty(logits.shape, dtype=torch.float32)
    call = _call(_config(config), logits, bias, padding_mask, totals, d_losses)
    call.backward(_views.view(ids, "ids"), _views.view(weights, "weights"), _views.view(d_weights.contiguous(), "d_weights"),
                  _views.view(d_logits, "d_logits"))  # fmt: skip
    return d_logits.to(logits.dtype)


@_router_backward.register_fake
def _(logits, bias, padding_mask, ids, weights, totals, d_weights, d_losses, config):  # type: ignore[no-untyped-def]
    return torch.empty_like(logits)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, bias, padding_mask, config, _ = inputs
    ids, weights, counts, _, totals = output
    ctx.mark_non_differentiable(ids, counts, totals)
    ctx.save_for_backward(logits, bias, padding_mask, ids, weights, totals)
    ctx.config = config


def _backward(ctx, _ids, d_weights, _counts, d_losses, _totals):  # type: ignore[no-untyped-def]
    logits, bias, padding_mask, ids, weights, totals = ctx.saved_tensors
    d_weights = torch.zeros_like(weights) if d_weights is None else d_weights
    d_losses = torch.zeros(3) if d_losses is None else d_losses
    d_logits = torch.ops.waybill.router_backward(logits, bias, padding_mask, ids, weights, totals, d_weights, d_losses, ctx.config)
    return d_logits, None, None, None, None


_router.register_autograd(_backward, setup_context=_setup)


def _fabric_number(fabric: Fabric | None) -> int:
    if fabric is None:
        return 0
    number = getattr(fabric, "_number", None)
    if number is None:
        number = fabric._number = _views.register(fabric)  # type: ignore[attr-defined]
    return number


def router(logits: Tensor, config: RouterConfig, *, bias: Tensor | None = None, padding_mask: Tensor | None = None, fabric: Fabric | None = None) -> Routes:
    """Chooses K of E experts for each token; nothing [T, E] is made but the gradient of the logits.

    logits [T, E] float32, bfloat16 or float16 (T may be 0). bias [E] float32: moves the choice, never the weights; no gradient.
    padding_mask [T] bool or uint8, True = padding: ids -1, weights 0, gradient 0. fabric: losses use counts summed over its ranks
    (collective). Gradients: of weights and losses with respect to logits. Errors: ValueError, NotImplementedError for GPU tensors.
    """
    _views.check(logits, "logits", _LOGITS, ["T", config.E])
    if bias is not None:
        _views.check(bias, "bias", [torch.float32], [config.E])
    if padding_mask is not None:
        _views.check(padding_mask, "padding_mask", [torch.bool, torch.uint8], [logits.shape[0]])
        padding_mask = padding_mask.to(torch.uint8)
    ids, weights, counts, losses, _ = torch.ops.waybill.router(logits.contiguous(), bias, padding_mask, config.text, _fabric_number(fabric))
    return Routes(ids, weights, counts, losses)
