# SPDX-License-Identifier: Apache-2.0
"""The router: logits [T, E] -> compact routes [T, K], with the exact gradient of weights and losses."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _core
from ..config import RouterConfig
from . import _ffi


class Routes(NamedTuple):
    """ids [T, K] int16 (int32 above 32,768 experts; -1 = none), weights [T, K] float32, counts [E] int32 (summed over the axis),
    losses [3] float32: auxiliary, sequence, z; coefficients included, this device's share (psum gives the loss)."""

    ids: jax.Array
    weights: jax.Array
    counts: jax.Array
    losses: jax.Array


def _has_losses(config: RouterConfig) -> bool:
    return bool(config.aux_coefficient or config.sequence_coefficient or config.z_coefficient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _router(logits: jax.Array, bias: jax.Array, mask: jax.Array, config: RouterConfig, axis_name: str | None) -> Routes:
    return _forward(logits, bias, mask, config, axis_name)[0]


def _forward(logits: jax.Array, bias: jax.Array, mask: jax.Array, config: RouterConfig, axis_name: str | None) -> tuple[Routes, Any]:
    T, E = logits.shape
    settings = _ffi.config_bytes(config.struct())
    ids, weights, counts = _ffi.call("router_forward", (_ffi.shape((T, config.K), _ffi.id_dtype(E)), _ffi.shape((T, config.K)), _ffi.shape((E,), jnp.int32)),
                                     logits, bias, mask, config=settings)  # fmt: skip
    if mask.size == 0 and axis_name is None:
        share = jnp.zeros(0, jnp.float32)  # 1 each
    else:
        tokens = jnp.float32(T) if mask.size == 0 else jnp.sum(mask == 0).astype(jnp.float32)
        if axis_name is not None:  # local counts and one psum; logits never travel
            counts, tokens = jax.lax.psum((counts, tokens), axis_name)
        share = jnp.where(tokens > 0, T / jnp.maximum(tokens, 1), 0)  # the ops average over T rows
        share = jnp.stack([share * share, jnp.ones_like(share), share])
    if _has_losses(config):
        losses = _ffi.call("router_losses", _ffi.shape((3,)), logits, bias, mask, ids, weights, counts, share, config=settings)
    else:
        losses = jnp.zeros(3, jnp.float32)
    return Routes(ids, weights, counts, losses), (logits, bias, mask, ids, weights, counts, share)


def _backward(config: RouterConfig, axis_name: str | None, saved: Any, cotangents: Routes) -> tuple[Any, ...]:
    logits, bias, mask, ids, weights, counts, share = saved
    if not _has_losses(config):
        loss_weights = jnp.zeros(0, jnp.float32)  # no weight is asked for, and XLA makes none
    else:
        loss_weights = cotangents.losses if share.size == 0 else cotangents.losses * share
    d_logits = _ffi.call("router_backward", _ffi.shape(logits.shape), logits, bias, mask, ids, weights, counts, cotangents.weights, loss_weights,
                         config=_ffi.config_bytes(config.struct()))  # fmt: skip
    return d_logits.astype(logits.dtype), None, None


_router.defvjp(_forward, _backward)


def router(logits: jax.Array, config: RouterConfig, *, bias: jax.Array | None = None, padding_mask: jax.Array | None = None,
           axis_name: str | None = None) -> Routes:  # fmt: skip
    """Chooses K of E experts for each token; nothing [T, E] is made but the gradient of the logits.

    logits [T, E] float32, bfloat16 or float16. bias [E] float32: moves the choice, never the weights; no gradient. padding_mask [T] bool,
    True = padding: ids -1, weights 0, gradient 0. axis_name: mesh axis (inside shard_map) over which the losses' counts are summed.
    Works under jit, grad, vmap (one call a batch element) and remat. ValueError where it is traced: wrong shapes and types, and configs that no router takes.
    """
    _core.check_router(config)
    _ffi.check(logits, "logits", [jnp.float32, jnp.bfloat16, jnp.float16], ["T", config.E], on_gpu=True)
    bias = jnp.zeros(0, jnp.float32) if bias is None else bias
    if bias.size:
        _ffi.check(bias, "bias", [jnp.float32], [config.E], on_gpu=True)
    if padding_mask is not None:
        _ffi.check(padding_mask, "padding_mask", [jnp.bool_, jnp.uint8], [logits.shape[0]], on_gpu=True)
    mask = jnp.zeros(0, jnp.uint8) if padding_mask is None else padding_mask.astype(jnp.uint8)
    _ffi.axis_size(axis_name)
    return _router(logits, bias, mask, config, axis_name)
