# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul as a custom op: every expert's rows times its weights in one call."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .. import _core
from . import _views


def _run(product: str, written: Tensor, a: Tensor, weights: Tensor, offsets: Tensor, y: Tensor, lcn: bool, bias: Optional[Tensor]) -> Tensor:
    stream, offsets_view = _views.stream(a), _views.view(offsets, "offsets")
    _core.grouped_gemm(product, _views.view(a, "a"), _views.view(weights, "weights"), offsets_view, _views.view(y, "y"), lcn=lcn,
                       bias=_views.optional_view(bias, "bias"), stream=stream)  # fmt: skip
    if product != "wgrad":  # rows of no group are not written by the product; they must not hold garbage
        _core.group_rows(offsets_view, _views.view(written, "rows"), written.shape[0], stream=stream)
    return written


@torch.library.custom_op("waybill::grouped_matmul", mutates_args=())
def _grouped_matmul(a: Tensor, weights: Tensor, offsets: Tensor, bias: Optional[Tensor], lcn: bool) -> Tensor:
    y = a.new_empty(a.shape[0], weights.shape[2 if lcn else 1])
    return _run("forward", y, a, weights, offsets, y, lcn, bias)


@_grouped_matmul.register_fake
def _(a, weights, offsets, bias, lcn):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], weights.shape[2 if lcn else 1])


@torch.library.custom_op("waybill::grouped_matmul_dgrad", mutates_args=())
def _dgrad(dy: Tensor, weights: Tensor, offsets: Tensor, lcn: bool) -> Tensor:
    da = dy.new_empty(dy.shape[0], weights.shape[1 if lcn else 2])
    return _run("dgrad", da, da, weights, offsets, dy, lcn, None)


@_dgrad.register_fake
def _(dy, weights, offsets, lcn):  # type: ignore[no-untyped-def]
    return dy.new_empty(dy.shape[0], weights.shape[1 if lcn else 2])


@torch.library.custom_op("waybill::grouped_matmul_wgrad", mutates_args=())
def _wgrad(a: Tensor, dy: Tensor, weights: Tensor, offsets: Tensor, with_bias: bool, lcn: bool) -> list[Tensor]:
    d_weights = torch.empty_like(weights)
    d_bias = dy.new_empty(weights.shape[0], dy.shape[1], dtype=torch.float32) if with_bias else None
    _run("wgrad", d_weights, a, d_weights, offsets, dy, lcn, d_bias)
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
    without rows has a weight gradient of exactly 0. CUDA tensors: on the current stream, without a wait, capturable; the offsets stay on the
    device and are not checked (nothing outside the tensors is touched).
    """
    if layout not in ("LNC", "LCN"):
        raise ValueError(f"layout is {layout!r}, allowed are 'LNC' and 'LCN'")
    _views.check(a, "a", _views.FLOATS, ["S", "C"], on_cuda=True)
    C = a.shape[1]
    _views.check(weights, "weights", [a.dtype], ["L", "N", C] if layout == "LNC" else ["L", C, "N"], like=a, on_cuda=True)
    L, N = weights.shape[0], weights.shape[1 if layout == "LNC" else 2]
    _views.check(offsets, "offsets", [torch.int32], [L + 1], like=a, on_cuda=True)
    if bias is not None:
        _views.check(bias, "bias", [torch.float32], [L, N], like=a, on_cuda=True)
    return torch.ops.waybill.grouped_matmul(a.contiguous(), weights.contiguous(), offsets, bias, layout == "LCN")
