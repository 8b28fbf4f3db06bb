# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine as pairs: start sends on a thread of its own and returns, done waits. What the program does in between overlaps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import _exchange, _ffi
from ._exchange import Slots


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows", "ids", "weights", "place", "handle"], meta_fields=["setup"])
@dataclasses.dataclass(frozen=True)
class Pending:
    """What has been started; give it to the matching done once. rows: x of a dispatch, y of a combine. handle: names the started call."""

    rows: jax.Array
    ids: jax.Array
    weights: jax.Array
    place: jax.Array
    handle: jax.Array
    setup: _exchange._Setup


def _start(op: str, rows: jax.Array, ids: jax.Array, weights: jax.Array, setup: _exchange._Setup) -> Pending:
    operands = tuple(jax.lax.stop_gradient(array) for array in (rows, ids, weights))
    place = setup.place(op, *operands)
    handle = _ffi.call(f"{op}_start", _ffi.shape((2,), jnp.uint32), place, *operands, **setup.attributes())
    return Pending(rows, ids, weights, place, handle, setup)


def dispatch_start(
    x: jax.Array, ids: jax.Array, weights: jax.Array, *, E: int, axis_name: str | None = None, receive_factor: float = 0.0, alignment: int = 1
) -> Pending:
    """Begins `dispatch` with the same arguments: x is copied, and travels on a thread of its own. Collective over the axis."""
    x, setup = _exchange.prepare_dispatch(x, ids, weights, E, axis_name, receive_factor, alignment)
    return _start("dispatch", x, ids, jax.lax.stop_gradient(weights), setup)


def dispatch_done(pending: Pending) -> Slots:
    """Waits for dispatch_start: what `dispatch` returns, bit for bit. Differentiable in x; its backward is one call that XLA may overlap."""
    return _dispatch_done(pending.rows, pending.ids, pending.weights, pending.place, pending.handle, pending.setup)


def combine_start(y: jax.Array, ids: jax.Array, weights: jax.Array, *, E: int, axis_name: str | None = None, receive_factor: float = 0.0, alignment: int = 1,
                  combine_wire: str = "float32") -> Pending:  # fmt: skip
    """Begins `combine` with the same arguments."""
    y, weights, setup = _exchange.prepare_combine(y, ids, weights, E, axis_name, receive_factor, alignment, combine_wire)
    return _start("combine", y, ids, weights, setup)


def combine_done(pending: Pending) -> jax.Array:
    """Waits for combine_start: what `combine` returns, bit for bit. Differentiable in y and weights."""
    return _combine_done(pending.rows, pending.ids, pending.weights, pending.place, pending.handle, pending.setup)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _dispatch_done(x: jax.Array, ids: jax.Array, weights: jax.Array, place: jax.Array, handle: jax.Array, setup: _exchange._Setup) -> Slots:
    return Slots(*_ffi.call("dispatch_done", setup.slots(x.dtype), place, x, ids, weights, handle, **setup.attributes()))


def _dispatch_done_forward(*arguments: Any) -> tuple[Slots, Any]:
    x, ids, weights = arguments[:3]
    return _dispatch_done(*arguments), (ids, weights, jnp.zeros(0, x.dtype))


def _dispatch_done_backward(setup: _exchange._Setup, saved: Any, cotangents: Slots) -> tuple[Any, ...]:
    return (*_exchange._dispatch_backward(setup, saved, cotangents), None, None)


_dispatch_done.defvjp(_dispatch_done_forward, _dispatch_done_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _combine_done(y: jax.Array, ids: jax.Array, weights: jax.Array, place: jax.Array, handle: jax.Array, setup: _exchange._Setup) -> jax.Array:
    return _ffi.call("combine_done", _ffi.shape((setup.T, setup.H)), place, y, ids, weights, handle, **setup.attributes())


def _combine_done_forward(*arguments: Any) -> tuple[jax.Array, Any]:
    return _combine_done(*arguments), arguments[:3]


def _combine_done_backward(setup: _exchange._Setup, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    return (*_exchange._combine_backward(setup, saved, d_out), None, None)


_combine_done.defvjp(_combine_done_forward, _combine_done_backward)
