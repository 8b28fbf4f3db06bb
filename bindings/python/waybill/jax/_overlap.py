# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine as pairs: start sends on a thread (CPU) or stream (GPU) of its own and returns, done waits. What a program does in between overlaps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import _device_block, _exchange, _ffi
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
    if setup.on_gpu:  # calls of a program come in one order on all devices: no meeting is needed
        handle = _ffi.call(f"device_{op}_start", _ffi.shape((2,), jnp.uint32), *operands, group=_pair_group(setup), **setup.attributes())
        return Pending(rows, ids, weights, jnp.zeros(4, jnp.uint32), handle, setup)
    place = setup.place(op, *operands)
    handle = _ffi.call(f"{op}_start", _ffi.shape((2,), jnp.uint32), place, *operands, **setup.attributes())
    return Pending(rows, ids, weights, place, handle, setup)


def _pair_group(setup: _exchange._Setup) -> Any:
    # A done without its start does the whole call, on the exchange of the whole calls.
    return _device_block.ensure("exchange", setup.struct(), setup.axis_name, setup.P, (0, 1))


def _done(op: str, results: Any, place: jax.Array, operands: tuple[jax.Array, ...], setup: _exchange._Setup) -> Any:
    if setup.on_gpu:
        return _ffi.call(f"device_{op}_done", results, *operands, group=_pair_group(setup), **setup.attributes())
    return _ffi.call(f"{op}_done", results, place, *operands, **setup.attributes())


def dispatch_start(
    x: jax.Array, ids: jax.Array, weights: jax.Array, *, E: int, axis_name: str | None = None, receive_factor: float = 0.0, alignment: int = 1,
    hierarchy: str = "flat", platform: str | None = None,
) -> Pending:
    """Begins `dispatch` with the same arguments: x is copied, and travels on a thread of its own. Collective over the axis.

    On a GPU it travels on a stream of its own, one call at a time: a second start before the first one's done leaves both to their dones, without overlap.
    Other calls of Waybill wait for it where they are not recorded in a command buffer; XLA's own collectives do not know of it.
    """
    on_gpu = _device_block.platform(x, platform) == "cuda"
    x, setup = _exchange.prepare_dispatch(x, ids, weights, E, axis_name, receive_factor, alignment, hierarchy, on_gpu)
    return _start("dispatch", x, ids, jax.lax.stop_gradient(weights), setup)


def dispatch_done(pending: Pending) -> Slots:
    """Waits for dispatch_start: what `dispatch` returns, bit for bit. Differentiable in x; its backward is one call that XLA may overlap."""
    return _dispatch_done(pending.rows, pending.ids, pending.weights, pending.place, pending.handle, pending.setup)


def combine_start(y: jax.Array, ids: jax.Array, weights: jax.Array, *, E: int, axis_name: str | None = None, receive_factor: float = 0.0, alignment: int = 1,
                  combine_wire: str = "float32", hierarchy: str = "flat", platform: str | None = None) -> Pending:  # fmt: skip
    """Begins `combine` with the same arguments. See dispatch_start."""
    on_gpu = _device_block.platform(y, platform) == "cuda"
    y, weights, setup = _exchange.prepare_combine(y, ids, weights, E, axis_name, receive_factor, alignment, combine_wire, hierarchy, on_gpu)
    return _start("combine", y, ids, weights, setup)


def combine_done(pending: Pending) -> jax.Array:
    """Waits for combine_start: what `combine` returns, bit for bit. Differentiable in y and weights."""
    return _combine_done(pending.rows, pending.ids, pending.weights, pending.place, pending.handle, pending.setup)


def overlap(pending: Pending, work: Callable[..., Any], *operands: Any) -> tuple[Pending, Any]:
    """(pending, work(*operands)), where XLA computes the work behind the start and before the done that pending is given to.

    Without it XLA's scheduler decides: it may put the work before the start, or behind the done, and nothing overlaps. operands: pytrees of arrays;
    what work closes over is not held back. Differentiable; the backward's order is XLA's own."""
    operands, handle = jax.lax.optimization_barrier((operands, pending.handle))
    result, handle = jax.lax.optimization_barrier((work(*operands), handle))
    return dataclasses.replace(pending, handle=handle), result


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _dispatch_done(x: jax.Array, ids: jax.Array, weights: jax.Array, place: jax.Array, handle: jax.Array, setup: _exchange._Setup) -> Slots:
    return Slots(*_done("dispatch", setup.slots(x.dtype), place, (x, ids, weights, handle), setup))


def _dispatch_done_forward(*arguments: Any) -> tuple[Slots, Any]:
    x, ids, weights = arguments[:3]
    return _dispatch_done(*arguments), (ids, weights, jnp.zeros(0, x.dtype))


def _dispatch_done_backward(setup: _exchange._Setup, saved: Any, cotangents: Slots) -> tuple[Any, ...]:
    return (*_exchange._dispatch_backward(setup, saved, cotangents), None, None)


_dispatch_done.defvjp(_dispatch_done_forward, _dispatch_done_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _combine_done(y: jax.Array, ids: jax.Array, weights: jax.Array, place: jax.Array, handle: jax.Array, setup: _exchange._Setup) -> jax.Array:
    return _done("combine", _ffi.shape((setup.T, setup.H)), place, (y, ids, weights, handle), setup)


def _combine_done_forward(*arguments: Any) -> tuple[jax.Array, Any]:
    return _combine_done(*arguments), arguments[:3]


def _combine_done_backward(setup: _exchange._Setup, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    return (*_exchange._combine_backward(setup, saved, d_out), None, None)


_combine_done.defvjp(_combine_done_forward, _combine_done_backward)
