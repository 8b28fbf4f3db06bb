# SPDX-License-Identifier: Apache-2.0
"""The router as a custom op: logits [T, E] -> compact routes [T, K], with the exact backward of weights and losses."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple, Optional

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


def _call(config: RouterConfig, logits: Tensor, bias: Optional[Tensor], padding_mask: Optional[Tensor], totals: Optional[Tensor] = None) -> _core.RouterCall:
    options: dict[str, Any] = {}
    if totals is not None:  # [E + 1] int64: counts over all ranks, then valid tokens
        # The losses average over T rows; _share() has the rest.
        options = {"aux_counts": _views.view(totals[:-1].to(torch.int32), "counts"), "aux_tokens": logits.shape[0], "loss_tokens": logits.shape[0]}
    return _core.RouterCall(config.struct(), _views.view(logits, "logits"), bias=_views.optional_view(bias, "bias"),
                            padding_mask=_views.optional_view(padding_mask, "padding_mask"), stream=_views.stream(logits), **options)  # fmt: skip


def _share(T: int, totals: Tensor) -> Tensor:
    """[3] float32: what the losses over T rows are multiplied by, so that they are those over the tokens of totals."""
    tokens = totals[-1:].to(torch.float64)
    share = torch.where(tokens > 0, T / tokens.clamp(min=1), 0.0)
    return torch.cat([share * share, torch.ones_like(share), share]).to(torch.float32)


@torch.library.custom_op("waybill::router", mutates_args=())
def _router(logits: Tensor, bias: Optional[Tensor], padding_mask: Optional[Tensor], config: str, fabric: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    settings = _config(config)
    T, E = logits.shape
    ids = logits.new_empty(T, settings.K, dtype=_id_dtype(E))
    weights = logits.new_empty(T, settings.K, dtype=torch.float32)
    counts = logits.new_empty(E, dtype=torch.int32)
    call = _call(settings, logits, bias, padding_mask)
    ids_view, weights_view = _views.view(ids, "ids"), _views.view(weights, "weights")
    call.forward(ids_view, weights_view, _views.view(counts, "counts"))
    tokens = counts.new_full((1,), T, dtype=torch.int64) if padding_mask is None else (padding_mask == 0).sum(dtype=torch.int64).reshape(1)
    totals = torch.cat([counts.to(torch.int64), tokens])
    if fabric:
        _all_reduce(_views.lookup(fabric, "fabric"), totals)
    losses = logits.new_zeros(3, dtype=torch.float32)
    if settings.aux_coefficient or settings.sequence_coefficient or settings.z_coefficient:
        share = _views.view(_share(T, totals), "share") if fabric or padding_mask is not None else None
        _call(settings, logits, bias, padding_mask, totals).losses_weighted(ids_view, weights_view, share, _views.view(losses, "losses"))
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
    d_logits = logits.new_empty(logits.shape, dtype=torch.float32)
    call = _call(_config(config), logits, bias, padding_mask, totals)
    loss_weights = d_losses.to(torch.float32) * _share(logits.shape[0], totals)
    call.backward(_views.view(ids, "ids"), _views.view(weights, "weights"), _views.view(d_weights.contiguous(), "d_weights"),
                  _views.view(d_logits, "d_logits"), _views.view(loss_weights, "loss_weights"))  # fmt: skip
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
    d_losses = weights.new_zeros(3) if d_losses is None else d_losses
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
    (collective; CPU tensors only). Gradients: of weights and losses with respect to logits. CUDA tensors: on the current stream, without a wait,
    capturable. Errors: ValueError; NotImplementedError for GPU tensors where the library has no CUDA kernels.
    """
    if fabric is not None and logits.is_cuda:
        raise NotImplementedError("a fabric sums counts on the CPU; all-reduce the counts of CUDA tensors with torch.distributed")
    _views.check(logits, "logits", _LOGITS, ["T", config.E], on_cuda=True)
    if bias is not None:
        _views.check(bias, "bias", [torch.float32], [config.E], like=logits, on_cuda=True)
    if padding_mask is not None:
        _views.check(padding_mask, "padding_mask", [torch.bool, torch.uint8], [logits.shape[0]], like=logits, on_cuda=True)
        padding_mask = padding_mask.to(torch.uint8)
    text = config.text  # type: ignore[attr-defined]  # no field of it
    ids, weights, counts, losses, _ = torch.ops.waybill.router(logits.contiguous(), bias, padding_mask, text, _fabric_number(fabric))
    return Routes(ids, weights, counts, losses)
