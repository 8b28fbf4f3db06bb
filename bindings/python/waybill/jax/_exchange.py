# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine along a mesh axis, with static shapes; without an axis they are the local permute and unpermute."""

from __future__ import annotations

import ctypes as c
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _abi, _device
from .._library import check, library
from ..config import HIERARCHIES, WIRES, choice
from . import _device_block, _ffi


class Slots(NamedTuple):
    """rows [S_max, H] of this device's experts, expert after expert, 0 past the last; group_sizes [L] int32 (with alignment padding): what
    grouped_matmul takes; valid: int32, 0 after an overflow of the slot budget on any device (everything is 0 then: skip the update)."""

    rows: jax.Array
    group_sizes: jax.Array
    valid: jax.Array


class _Setup(NamedTuple):
    E: int
    K: int
    T: int
    H: int
    P: int
    axis_name: str | None
    receive_factor: float
    alignment: int
    combine_wire: str
    hierarchy: str
    on_gpu: bool = False

    @property
    def num_slots(self) -> int:
        return _device.num_slots(self.struct(), self.P)

    def struct(self) -> _abi.ExchangeConfig:
        config = _abi.ExchangeConfig()
        check(library().wb_exchange_config_init(c.byref(config), c.sizeof(config)))
        config.H, config.E, config.K, config.T_max, config.alignment = self.H, self.E, self.K, self.T, self.alignment
        config.receive_factor, config.mode, config.combine_wire = self.receive_factor, 1, choice(self.combine_wire, WIRES, "combine_wire")
        config.hierarchy = choice(self.hierarchy, HIERARCHIES, "hierarchy")
        return config

    def attributes(self) -> dict[str, Any]:
        return {"E": self.E, "P": self.P, "config": _ffi.config_bytes(self.struct())}

    def place(self, op: str, *operands: jax.Array) -> jax.Array:
        return _ffi.place(op, self.axis_name, self.attributes()["config"], operands)

    def call(self, op: str, results: Any, *operands: jax.Array, **options: Any) -> Any:
        if self.on_gpu:  # calls of a program come in one order on all devices: no meeting is needed
            group = _device_block.ensure("exchange", self.struct(), self.axis_name, self.P)
            return _ffi.call(f"device_{op}", results, *operands, group=group, **options, **self.attributes())
        return _ffi.call(op, results, self.place(op, *operands), *operands, **options, **self.attributes())

    def slots(self, dtype: Any) -> tuple[Any, ...]:
        """Shapes of a dispatch's results."""
        return _ffi.shape((self.num_slots, self.H), dtype), _ffi.shape((self.E // self.P,), jnp.int32), _ffi.shape((), jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dispatch(x: jax.Array, ids: jax.Array, weights: jax.Array, setup: _Setup) -> Slots:
    return Slots(*setup.call("dispatch", setup.slots(x.dtype), x, ids, weights))


def _dispatch_forward(x: jax.Array, ids: jax.Array, weights: jax.Array, setup: _Setup) -> tuple[Slots, Any]:
    return _dispatch(x, ids, weights, setup), (ids, weights, jnp.zeros(0, x.dtype))


def _dispatch_backward(setup: _Setup, saved: Any, cotangents: Slots) -> tuple[Any, ...]:
    ids, weights, like = saved
    dx = setup.call("combine", _ffi.shape((setup.T, setup.H)), cotangents.rows, ids, weights, weighted=False)
    return dx.astype(like.dtype), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _combine(y: jax.Array, ids: jax.Array, weights: jax.Array, setup: _Setup) -> jax.Array:
    return setup.call("combine", _ffi.shape((setup.T, setup.H)), y, ids, weights, weighted=True)


def _combine_forward(y: jax.Array, ids: jax.Array, weights: jax.Array, setup: _Setup) -> tuple[jax.Array, Any]:
    return _combine(y, ids, weights, setup), (y, ids, weights)


def _combine_backward(setup: _Setup, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    y, ids, weights = saved
    dy, d_weights = setup.call("combine_backward", (_ffi.shape(y.shape, y.dtype), _ffi.shape(weights.shape)), d_out, y, ids, weights)
    return dy, None, d_weights


_combine.defvjp(_combine_forward, _combine_backward)


def _setup(ids: jax.Array, weights: jax.Array, E: int, H: int, axis_name: str | None, receive_factor: float, alignment: int, combine_wire: str,
           hierarchy: str, on_gpu: bool) -> _Setup:  # fmt: skip
    _ffi.check(ids, "ids", [jnp.int16, jnp.int32], ["T", "K"], on_gpu=on_gpu)
    _ffi.check(weights, "weights", [jnp.float32], ids.shape, on_gpu=on_gpu)
    P = _ffi.axis_size(axis_name)
    if E % P:
        raise ValueError(f"E = {E} experts cannot be spread evenly over the {P} devices of axis {axis_name!r}")
    if alignment < 1 or not 0 <= receive_factor < math.inf:
        raise ValueError(f"alignment = {alignment} must be positive, receive_factor = {receive_factor} finite and not negative")
    choice(hierarchy, HIERARCHIES, "hierarchy")
    return _Setup(E, ids.shape[1], ids.shape[0], H, P, axis_name, float(receive_factor), alignment, combine_wire, hierarchy, on_gpu)


def prepare_dispatch(
    x: jax.Array, ids: jax.Array, weights: jax.Array, E: int, axis_name: str | None, receive_factor: float, alignment: int, hierarchy: str, on_gpu: bool
) -> tuple[jax.Array, _Setup]:
    _ffi.check(x, "x", _ffi.FLOATS, [ids.shape[0], "H"], on_gpu=on_gpu)
    setup = _setup(ids, weights, E, x.shape[1], axis_name, receive_factor, alignment, "float32", hierarchy, on_gpu)
    return _ffi.varying(x, axis_name), setup


def prepare_combine(y: jax.Array, ids: jax.Array, weights: jax.Array, E: int, axis_name: str | None, receive_factor: float, alignment: int,
                    combine_wire: str, hierarchy: str, on_gpu: bool) -> tuple[jax.Array, jax.Array, _Setup]:  # fmt: skip
    _ffi.check(y, "y", _ffi.FLOATS, ["S_max", "H"], on_gpu=on_gpu)
    setup = _setup(ids, weights, E, y.shape[1], axis_name, receive_factor, alignment, combine_wire, hierarchy, on_gpu)
    if y.shape[0] != setup.num_slots:
        raise ValueError(f"y has {y.shape[0]} slots, the budget of these arguments is {setup.num_slots}; give combine the arguments of dispatch")
    y, weights = _ffi.varying((y, weights), axis_name)
    return y, weights, setup


def dispatch(
    x: jax.Array, ids: jax.Array, weights: jax.Array, *, E: int, axis_name: str | None = None, receive_factor: float = 0.0, alignment: int = 1,
    hierarchy: str = "flat", platform: str | None = None,
) -> Slots:
    """Sends each token once to every device that holds one of its experts, and lines the rows up by expert there. Collective over the axis.

    x [T, H] float32 or bfloat16; ids, weights [T, K] from `router`. E experts, E / P on each of the P devices of `axis_name`. receive_factor f: the
    slot budget S_max = ceil(f * T * K), as ragged_buffer_factor elsewhere; 0 = worst case P * T * min(K, E / P). An overflow never drops
    rows silently: Slots.valid is 0 on every device. Differentiable in x. Backward plans again from the routes; nothing else is kept. On a GPU: H a
    multiple of 8, ids int16 (int32 above 32,768 experts), the axis as moe_block says; platform: see there.
    hierarchy: "flat", or "two_level"/"auto" for an axis over several nodes.
    """
    x, setup = prepare_dispatch(x, ids, weights, E, axis_name, receive_factor, alignment, hierarchy, _device_block.platform(x, platform) == "cuda")
    return _dispatch(x, ids, jax.lax.stop_gradient(weights), setup)


def combine(y: jax.Array, ids: jax.Array, weights: jax.Array, *, E: int, axis_name: str | None = None, receive_factor: float = 0.0, alignment: int = 1,
            combine_wire: str = "float32", hierarchy: str = "flat", platform: str | None = None) -> jax.Array:  # fmt: skip
    """y [S_max, H] of the experts -> out [T, H] float32: slots times their weights in order k, then devices in order. Collective.

    The other arguments must be those of `dispatch`. Differentiable in y and weights.
    """
    y, weights, setup = prepare_combine(y, ids, weights, E, axis_name, receive_factor, alignment, combine_wire, hierarchy,
                                        _device_block.platform(y, platform) == "cuda")  # fmt: skip
    return _combine(y, ids, weights, setup)


def permute(x: jax.Array, ids: jax.Array, weights: jax.Array, *, E: int, alignment: int = 1, platform: str | None = None) -> Slots:
    """dispatch on one device: rows by expert, [T * K (+ alignment padding), H]."""
    return dispatch(x, ids, weights, E=E, alignment=alignment, platform=platform)


def unpermute(y: jax.Array, ids: jax.Array, weights: jax.Array, *, E: int, alignment: int = 1, platform: str | None = None) -> jax.Array:
    """combine on one device: the weighted sum of each token's slots, [T, H] float32."""
    return combine(y, ids, weights, E=E, alignment=alignment, platform=platform)
