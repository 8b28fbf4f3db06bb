# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul with the semantics and layout of jax.lax.ragged_dot."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import _ffi


def _call(result: jax.ShapeDtypeStruct, first: jax.Array, second: jax.Array, sizes: jax.Array, product: int, lcn: bool) -> jax.Array:
    room = _ffi.shape((sizes.shape[0] + 1,), jnp.int32)  # for the offsets of the groups
    return _ffi.call("grouped_matmul", (result, room), first, second, sizes, product=product, lcn=lcn)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _matmul(a: jax.Array, weights: jax.Array, sizes: jax.Array, lcn: bool, dtype: Any) -> jax.Array:
    N = weights.shape[2 if lcn else 1]
    return _call(_ffi.shape((a.shape[0], N), dtype), a, weights, sizes, 0, lcn)


def _forward(a: jax.Array, weights: jax.Array, sizes: jax.Array, lcn: bool, dtype: Any) -> tuple[jax.Array, Any]:
    return _matmul(a, weights, sizes, lcn, dtype), (a, weights, sizes)


def _backward(lcn: bool, dtype: Any, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    a, weights, sizes = saved
    dy = dy.astype(a.dtype)
    da = _call(_ffi.shape(a.shape, a.dtype), weights, dy, sizes, 1, lcn)
    d_weights = _call(_ffi.shape(weights.shape, weights.dtype), a, dy, sizes, 2, lcn)
    return da, d_weights, None


_matmul.defvjp(_forward, _backward)


def grouped_matmul(a: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, layout: str = "LCN", preferred_element_type: Any = None) -> jax.Array:
    """y[s] = a[s] W_g for the rows of each group; groups lie one after another, rows past their sum give 0. Accumulates in float32.

    a [S, C] float32 or bfloat16. weights [L, C, N] (layout "LCN", as ragged_dot) or [L, N, C] ("LNC"), the dtype of a. group_sizes [L]
    int32. Returns [S, N] in a's dtype or preferred_element_type (float32). Gradients: a and weights; those of empty groups are exactly 0.
    On a GPU group_sizes stay on the device: negative ones count as 0 and what passes the S rows is cut off, where the CPU raises an error.
    """
    if layout not in ("LCN", "LNC"):
        raise ValueError(f"layout is {layout!r}, allowed are 'LCN' and 'LNC'")
    _ffi.check(a, "a", _ffi.FLOATS, ["S", "C"], on_gpu=True)
    _ffi.check(weights, "weights", [a.dtype], ["L", a.shape[1], "N"] if layout == "LCN" else ["L", "N", a.shape[1]], on_gpu=True)
    _ffi.check(group_sizes, "group_sizes", [jnp.int32], [weights.shape[0]], on_gpu=True)
    dtype = jnp.dtype(preferred_element_type or a.dtype)
    if dtype not in (a.dtype, jnp.dtype(jnp.float32)):
        raise ValueError(f"preferred_element_type is {dtype}, allowed are {a.dtype} and float32")
    return _matmul(a, weights, group_sizes, layout == "LCN", dtype)


def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, precision: Any = None, preferred_element_type: Any = None,
               group_offset: Any = None) -> jax.Array:  # fmt: skip
    """jax.lax.ragged_dot by Waybill: lhs [m, k], rhs [g, k, n], group_sizes [g] -> [m, n]. precision is met by float32 accumulation."""
    del precision
    if group_offset is not None:
        raise NotImplementedError("group_offset is not supported; pass the groups of this shard")
    return grouped_matmul(lhs, rhs, group_sizes.astype(jnp.int32), preferred_element_type=preferred_element_type)
