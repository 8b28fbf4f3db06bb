# SPDX-License-Identifier: Apache-2.0
"""MX block formats as custom ops: FP8 elements with one power-of-two scale for 32 of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import _core
from . import _views

_ELEMENTS = {"e4m3": (0, torch.float8_e4m3fn), "e5m2": (1, torch.float8_e5m2)}
_RULES = {"round_up": 0, "floor": 1}
BLOCK = 32


@torch.library.custom_op("waybill::quantize_mx", mutates_args=())
def _quantize(x: Tensor, element: str, rule: str) -> tuple[Tensor, Tensor]:
    C = x.shape[-1]
    codes, scales = torch.empty(x.shape, dtype=_ELEMENTS[element][1], device=x.device), x.new_empty(*x.shape[:-1], C // BLOCK, dtype=torch.uint8)
    config = _core.quant_config(element=_ELEMENTS[element][0], rule=_RULES[rule])
    _core.quantize(config, _views.view(x.view(-1, C), "x"), _views.view(codes.view(-1, C), "codes"), _views.view(scales.view(-1, C // BLOCK), "scales"),
                   stream=_views.stream(x))  # fmt: skip
    return codes, scales


@_quantize.register_fake
def _(x, element, rule):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape, dtype=_ELEMENTS[element][1]), x.new_empty(*x.shape[:-1], x.shape[-1] // BLOCK, dtype=torch.uint8)


@torch.library.custom_op("waybill::dequantize_mx", mutates_args=())
def _dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    C = codes.shape[-1]
    y = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    element = next(number for number, kind in _ELEMENTS.values() if kind == codes.dtype)
    _core.dequantize(_core.quant_config(element=element), _views.view(codes.view(-1, C), "codes"), _views.view(scales.view(-1, C // BLOCK), "scales"),
                     _views.view(y.view(-1, C), "y"), stream=_views.stream(codes))  # fmt: skip
    return y


@_dequantize.register_fake
def _(codes, scales, dtype):  # type: ignore[no-untyped-def]
    return codes.new_empty(codes.shape, dtype=dtype)


def _choice(value: str, allowed: Mapping[str, object], name: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, allowed are {', '.join(allowed)}")


def quantize_mx(x: Tensor, *, element: str = "e4m3", rule: str = "round_up") -> tuple[Tensor, Tensor]:
    """x [..., C] float32 or bfloat16 -> codes [..., C] float8, scales [..., C / 32] uint8 (E8M0: 2^(byte - 127), 255 = NaN).

    element: "e4m3" or "e5m2". rule: "round_up" (never saturates) or "floor" (the text of the OCP specification). C must be a multiple of 32.
    Not differentiable. CUDA tensors: on the current stream, without a wait, capturable; the codes of the CPU.
    """
    _choice(element, _ELEMENTS, "element")
    _choice(rule, _RULES, "rule")
    _views.check(x, "x", _views.FLOATS, [None] * x.dim(), on_cuda=True)
    if x.dim() == 0 or x.shape[-1] % BLOCK or x.shape[-1] == 0:
        raise ValueError(f"x has shape {list(x.shape)}: its last dimension must be a multiple of {BLOCK}")
    return torch.ops.waybill.quantize_mx(x.detach().contiguous(), element, rule)


def dequantize_mx(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes [..., C] float8, scales [..., C / 32] uint8 -> [..., C] float32 or bfloat16."""
    _views.check(codes, "codes", [kind for _, kind in _ELEMENTS.values()], [None] * codes.dim(), on_cuda=True)
    if codes.dim() == 0:
        raise ValueError("codes has shape []: its last dimension must be a multiple of 32")
    _views.check(scales, "scales", [torch.uint8], [*codes.shape[:-1], codes.shape[-1] // BLOCK], like=codes, on_cuda=True)
    if dtype not in _views.FLOATS:
        raise ValueError(f"dtype is {str(dtype)[6:]}, allowed are float32, bfloat16")
    return torch.ops.waybill.dequantize_mx(codes.contiguous(), scales.contiguous(), dtype)
