# SPDX-License-Identifier: Apache-2.0
"""The whole MoE block as one custom VJP."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .. import _abi
from ..config import MoeConfig
from . import _device_block, _ffi

NAMES = _abi.MOE_TENSORS
ROUTES = "waybill_routes"  # checkpoint_name of the small residuals: save them under remat and backward does not run the forward again


class MoeOutput(NamedTuple):
    """What a call did. loss: float32 scalar, this device's share of all auxiliary losses together, differentiable (psum gives the loss).
    losses [4]: auxiliary, sequence, global, z. ids, weights [T, K]: this device's routes. counts [E] int32: routes per expert over the axis.
    status [6] int32: valid, slot demand, slot capacity, rows, slots, flags; `valid` is 0 after an overflow of the slot budget on any device,
    or (GPUs on several nodes) after a rank was lost: flags has 8 then."""

    loss: jax.Array
    losses: jax.Array
    ids: jax.Array
    weights: jax.Array
    counts: jax.Array
    status: jax.Array

    @property
    def valid(self) -> jax.Array:
        return self.status[0] != 0


class _Setup(NamedTuple):
    config: MoeConfig
    axis_name: str | None
    P: int
    saved_steps: int
    training: bool

    def attributes(self, T: int) -> dict[str, Any]:
        struct = self.config.struct()
        if self.config.mode == "captured" and not struct.T_max:
            struct.T_max = T
        return {"P": self.P, "config": _ffi.config_bytes(struct)}


def _given(params: dict[str, jax.Array], mask: jax.Array | None) -> int:
    return sum(1 << index for index, name in enumerate(NAMES) if name in params) | (0 if mask is None else 1 << len(NAMES))


def _list(params: dict[str, jax.Array], mask: jax.Array | None) -> list[jax.Array]:
    return [params[name] for name in NAMES if name in params] + ([] if mask is None else [mask])


def _run(x: jax.Array, params: dict[str, jax.Array], mask: jax.Array | None, seed: jax.Array, setup: _Setup, keep: int) -> tuple[Any, Any]:
    T, router = x.shape[0], setup.config.router
    results = (_ffi.shape(x.shape), _ffi.shape((T, router.K), _ffi.id_dtype(router.E)), _ffi.shape((T, router.K)), _ffi.shape((router.E,), jnp.int32),
               _ffi.shape((4,)), _ffi.shape((6,), jnp.int32), _ffi.shape((2,), jnp.uint32))  # fmt: skip
    attributes, operands = setup.attributes(T), [x, *_list(params, mask)]
    place = _ffi.place("moe_forward", setup.axis_name, attributes["config"], operands, seed)
    out, ids, weights, counts, losses, status, token = _ffi.call("moe_forward", results, place, *operands, given=_given(params, mask), keep=keep,
                                                                 training=setup.training, **attributes)  # fmt: skip
    return (out, MoeOutput(jnp.sum(losses), losses, ids, weights, counts, status)), token


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _block(x: jax.Array, params: dict[str, jax.Array], mask: jax.Array | None, seed: jax.Array, setup: _Setup) -> Any:
    return _run(x, params, mask, seed, setup, 0)[0]


def _forward(x: jax.Array, params: dict[str, jax.Array], mask: jax.Array | None, seed: jax.Array, setup: _Setup) -> Any:
    (out, stats), token = _run(x, params, mask, seed, setup, setup.saved_steps)
    routes = tuple(checkpoint_name(array, ROUTES) for array in (stats.ids, stats.weights, token))
    return (out, stats), (x, params, mask, seed, routes)


def _backward(setup: _Setup, saved: Any, cotangents: Any) -> Any:
    x, params, mask, seed, routes = saved
    d_out, d_stats = cotangents
    trained = [name for name in NAMES if name in params and name != "router_bias"]
    results = (_ffi.shape(x.shape), *(_ffi.shape(params[name].shape) for name in trained))
    attributes, operands = setup.attributes(x.shape[0]), [x, *_list(params, mask), *routes, d_out, d_stats.loss.reshape(1)]
    place = _ffi.place("moe_backward", setup.axis_name, attributes["config"], operands, seed)
    dx, *gradients = _ffi.call("moe_backward", results, place, *operands, given=_given(params, mask), **attributes)
    spread = dict(zip(trained, gradients))
    if "router_bias" in params:
        spread["router_bias"] = jnp.zeros_like(params["router_bias"])
    return dx, spread, None, None


_block.defvjp(_forward, _backward)


def init_params(key: jax.Array, config: MoeConfig, *, P: int = 1, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Parameters of the layer, all experts (P = 1) or one rank's; normal with deviation 1/sqrt(fan in), biases 0."""
    params = {}
    for index, (name, dims) in enumerate(config.shapes(P).items()):
        if name in ("b1", "b2", "router_bias"):
            params[name] = jnp.zeros(dims, jnp.float32 if name == "router_bias" else dtype)
        else:
            params[name] = (jax.random.normal(jax.random.fold_in(key, index), dims) * dims[-1] ** -0.5).astype(dtype)
    return params


def param_specs(config: MoeConfig, axis_name: str | None) -> dict[str, jax.sharding.PartitionSpec]:
    """How shard_map takes the parameters: experts split over the axis, the rest on every device."""
    spec = jax.sharding.PartitionSpec
    return {name: spec(axis_name) if name in ("w1", "w2", "b1", "b2") else spec() for name in config.shapes()}


def _check_params(params: Mapping[str, Any], config: MoeConfig, P: int, on_gpu: bool = False) -> None:
    shapes = config.shapes(P)
    if set(params) != set(shapes):
        missing, extra = sorted(set(shapes) - set(params)), sorted(set(params) - set(shapes))
        raise ValueError(f"params: missing {missing or 'none'}, unknown {extra or 'none'}; needed are {', '.join(shapes)}")
    for name, dims in shapes.items():
        _ffi.check(params[name], f"params['{name}']", _ffi.FLOATS, dims, on_gpu=on_gpu)


def moe_block(x: jax.Array, params: Mapping[str, jax.Array], config: MoeConfig, *, axis_name: str | None = None, padding_mask: jax.Array | None = None,
              training: bool = True, rounding_seed: jax.Array | int = 0, saved_steps: int = 1024,
              platform: str | None = None) -> tuple[jax.Array, MoeOutput]:  # fmt: skip
    """Gate, router, dispatch, experts, combine: (out [..., H], MoeOutput), with the exact gradient of out and MoeOutput.loss.

    x [..., H] float32 or bfloat16; the block computes in float32 and rounds the result once. params: config.shapes(P) says names and shapes
    (w1 [L, 2F, H]: gate then up; w2 [L, H, F]). axis_name: mesh axis of the experts; call it inside jax.shard_map, where each of its P devices
    brings its tokens and L = E / P experts. padding_mask [...] bool, True = padding. config.mode "captured" with receive_factor is the fixed
    slot budget; check MoeOutput.valid (`keep_if_valid`). training=False: no losses. rounding_seed (32 bits): for recipes with
    random numbers, one a layer, step and micro-batch, the same on every device.

    What backward needs is kept by the library for up to `saved_steps` forwards (outside of XLA's memory; jax.jit's memory analysis does not
    see it). A backward that finds nothing, or saved_steps=0, computes the forward again with the same routes. Under jax.checkpoint,
    policies.save_only_these_names(waybill.jax.ROUTES) keeps the routes [T, K] alone. vmap runs one call a batch element.

    On a GPU (config.recipe "bf16", "fp8", "mxfp8" or "nvfp4", a library with CUDA) matmuls run in bfloat16 or the recipe's formats and what backward
    needs is an array of XLA's (checkpoint_name waybill.jax.SAVED; saved_steps has no meaning). Gradients come in the dtype of the parameter, those of
    float32 ones unrounded. axis_name: an axis of one process a GPU in the order of the processes, or one whose GPUs lie within a process
    (docs/howto/jax.md). platform "cpu" or "cuda": needed where a program is traced for another backend than JAX's default.

    ValueError where it is traced: wrong shapes, types, names and settings, a mesh axis that is missing or does not divide E. NotImplementedError: settings that
    the layer on GPUs lacks, an axis of several processes with several GPUs each, arrays on a GPU with a library without CUDA. RuntimeError (XLA's) when it
    runs: configs that differ between processes, a lost peer.
    """
    place = _device_block.platform(x, platform)
    on_gpu = place == "cuda"
    _ffi.check(x, "x", _ffi.FLOATS, [None] * (x.ndim - 1) + [config.H], on_gpu=on_gpu)
    P = _ffi.axis_size(axis_name)
    _check_params(params, config, P, on_gpu)
    if padding_mask is not None:
        _ffi.check(padding_mask, "padding_mask", [jnp.bool_, jnp.uint8], x.shape[:-1], on_gpu=on_gpu)
        padding_mask = padding_mask.reshape(-1).astype(jnp.uint8)
    if on_gpu:
        # Only where the recipe draws, so that other programs have one operand less.
        seed = jnp.stack([jnp.asarray(rounding_seed, jnp.uint32), jnp.zeros((), jnp.uint32)]) if config.recipe == "nvfp4" else None
        setup_gpu = _device_block.Setup(config, axis_name, P, training)
        given = dict(params)
        if "router_bias" in given:
            given["router_bias"] = given["router_bias"].astype(jnp.float32)
        given, rows = _ffi.varying((given, x.reshape(-1, config.H)), axis_name)
        out, results = _device_block.block(rows, given, padding_mask, seed, setup_gpu)
        return out.reshape(x.shape), MoeOutput(*results)
    _ffi.check_block(config, math.prod(x.shape[:-1]))
    wide = {name: params[name].astype(jnp.float32) for name in params}
    setup = _Setup(config, axis_name, P, saved_steps, training)
    seed = jnp.asarray(rounding_seed, jnp.uint32)
    wide, rows = _ffi.varying((wide, x.reshape(-1, config.H).astype(jnp.float32)), axis_name)
    out, stats = _block(rows, wide, padding_mask, seed, setup)
    return out.astype(x.dtype).reshape(x.shape), stats
