# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul as a custom op: every expert's rows times its weights in one call."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .. import _core
from . import _views


def _zero_tail(rows: Tensor, offsets: Tensor) -> Tensor:
    """Rows that belong to no group are never written by the library; they must not hold garbage."""
    rows[int(offsets[-1]) :].zero_()
    return rows


@torch.library.custom_op("waybill::grouped_matmul", mutates_args=())
def _grouped_matmul(a: Tensor, weights: Tensor, offsets: Tensor, bias: Optional[Tensor], lcn: bool) -> Tensor:
    y = torch.empty(a.shape[0], weights.shape[2 if lcn else 1], dtype=a.dtype)
    _core.grouped_gemm("forward", _views.view(a, "a"), _views.view(weights, "weights"), _views.view(offsets, "offsets"), _views.view(y, "y"), lcn=lcn,
                       bias=_views.optional_view(bias, "bias"))  # fmt: skip
    return _zero_tail(y, offsets)


@_grouped_matmul.register_fake
def _(a, weights, offsets, bias, lcn):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], weights.shape[2 if lcn else 1])


@torch.library.custom_op("waybill::grouped_matmul_dgrad", mutates_args=())
def _dgrad(dy: Tensor, weights: Tensor, offsets: Tensor, lcn: bool) -> Tensor:
    da = torch.empty(dy.shape[0], weights.shape[1 if lcn else 2], dtype=dy.dtype)
    _core.grouped_gemm("dgrad", _views.view(da, "da"), _views.view(weights, "weights"), _views.view(offsets, "offsets"), _views.view(dy, "dy"), lcn=lcn)
    return _zero_tail(da, offsets)


@_dgrad.register_fake
def _(dy, weights, offsets, lcn):  # type: ignore[no-untyped-def]
    return dy.new_empty(dy.shape[0], weights.shape[1 if lcn else 2])


@torch.library.custom_op("waybill::grouped_matmul_wgrad", mutates_args=())
def _wgrad(a: Tensor, dy: Tensor, weights: Tensor, offsets: Tensor, with_bias: bool, lcn: bool) -> list[Tensor]:
    d_weights = torch.empty_like(weights)
    d_bias = torch.empty(weights.shape[0], dy.shape[1]) if with_bias else None
    _core.grouped_gemm("wgrad", _views.view(a, "a"), _views.view(d_weights, "d_weights"), _views.view(offsets, "offsets"), _views.view(dy, "dy"), lcn=lcn,
                       bias=_views.optional_view(d_bias, "d_bias"))  # fmt: skip
    return [d_weights] if d_bias is None else [d_weights, d_bias]


@_wgrad.register_fake
def _(a, dy, weights, offsets, with_bias, lcn):  # type: ignore[no-untyped-def]
    d_weights = torch.empty_like(weights)
    return [d_weights, dy.new_empty(weights.shape[0], dy.shape[1], dtype=torch.float32)] if with_bias else [d_weights]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    a, weights, offsets, bias, ctx.lcn = inputs
    ctx.with_bias = bias is not None
    ctx.save_for_backward(a, weights, offsets)


def _backward(ctx, dy):  # type: ignore[no-untyped-def]
    a, weights, offsets = ctx.saved_tensors
    ops, dy = torch.ops.waybill, dy.contiguous()
    da = ops.grouped_matmul_dgrad(dy, weights, offsets, ctx.lcn) if ctx.needs_input_grad[0] else None
    d_weights = d_bias = None
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[3]:
        d_weights, *rest = ops.grouped_matmul_wgrad(a, dy, weights, offsets, ctx.with_bias, ctx.lcn)
        d_bias = rest[0] if rest else None
    return da, d_weights, None, d_bias, None


_grouped_matmul.register_autograd(_backward, setup_context=_setup)


def grouped_matmul(a: Tensor, weights: Tensor, offsets: Tensor, *, bias: Tensor | None = None, layout: str = "LNC") -> Tensor:
    """y[s] = W_g a[s] (+ bias_g) for the rows s in [offsets[g], offsets[g+1]); rows past offsets[L] give 0. Accumulates in float32.

    a [S, C] float32 or bfloat16. weights [L, N, C] (layout "LNC", as torch.nn.Linear) or [L, C, N] ("LCN"), the dtype of a.
    offsets [L+1] int32, increasing from 0. bias [L, N] float32. Returns y [S, N] in a's dtype. Gradients: a, weights, bias; a group
    without rows has a weight gradient of exactly 0.
    """
    if layout not in ("LNC", "LCN"):
        raise ValueError(f"layout is {layout!r}, allowed are 'LNC' and 'LCN'")
    _views.check(a, "a", _views.FLOATS, ["S", "C"])
    C = a.shape[1]
    _views.check(weights, "weights", [a.dtype], ["L", "N", C] if layout == "LNC" else ["L", C, "N"])
    L, N = weights.shape[0], weights.shape[1 if layout == "LNC" else 2]
    _views.check(offsets, "offsets", [torch.int32], [L + 1])
    if bias is not None:
        _views.check(bias, "bias", [torch.float32], [L, N])
    return torch.ops.waybill.grouped_matmul(a.contiguous(), weights.contiguous(), offsets, bias, layout == "LCN")
