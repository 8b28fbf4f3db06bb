# SPDX-License-Identifier: Apache-2.0
"""MX block formats: FP8 elements with one power-of-two scale for 32 of them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import _core
from . import _ffi

_ELEMENTS: dict[str, tuple[int, Any]] = {"e4m3": (0, jnp.float8_e4m3fn), "e5m2": (1, jnp.float8_e5m2)}
_RULES = {"round_up": 0, "floor": 1}
BLOCK = 32


def _config(element: str, rule: str) -> Any:
    if element not in _ELEMENTS:
        raise ValueError(f"element is {element!r}, allowed are {', '.join(_ELEMENTS)}")
    if rule not in _RULES:
        raise ValueError(f"rule is {rule!r}, allowed are {', '.join(_RULES)}")
    return _ffi.config_bytes(_core.quant_config(element=_ELEMENTS[element][0], rule=_RULES[rule]))


def quantize_mx(x: jax.Array, *, element: str = "e4m3", rule: str = "round_up") -> tuple[jax.Array, jax.Array]:
    """x [..., C] float32 or bfloat16 -> codes [..., C] float8, scales [..., C / 32] uint8 (E8M0: 2^(byte - 127), 255 = NaN).

    element: "e4m3" or "e5m2". rule: "round_up" (never saturates) or "floor" (the text of the OCP specification). C must be a multiple of
    32. Not differentiable: gradients of codes are not defined.
    """
    _ffi.check(x, "x", _ffi.FLOATS, [None] * x.ndim, on_gpu=True)
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"x has shape {list(x.shape)}: its last dimension must be a multiple of {BLOCK}")
    C, rows = x.shape[-1], math.prod(x.shape[:-1])
    config = _config(element, rule)
    results = (_ffi.shape((rows, C), _ELEMENTS[element][1]), _ffi.shape((rows, C // BLOCK), jnp.uint8))
    codes, scales = _ffi.call("quantize", results, jax.lax.stop_gradient(x).reshape(rows, C), config=config)
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], C // BLOCK)


def dequantize_mx(codes: jax.Array, scales: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """codes [..., C] float8, scales [..., C / 32] uint8 -> [..., C] float32 or bfloat16."""
    _ffi.check(codes, "codes", [kind for _, kind in _ELEMENTS.values()], [None] * codes.ndim, on_gpu=True)
    C, rows = codes.shape[-1], math.prod(codes.shape[:-1])
    _ffi.check(scales, "scales", [jnp.uint8], [*codes.shape[:-1], C // BLOCK], on_gpu=True)
    element = next(name for name, (_, kind) in _ELEMENTS.items() if jnp.dtype(kind) == codes.dtype)
    y = _ffi.call("dequantize", _ffi.shape((rows, C), dtype), codes.reshape(rows, C), scales.reshape(rows, C // BLOCK), config=_config(element, "round_up"))
    return y.reshape(codes.shape)
