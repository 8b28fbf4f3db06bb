# SPDX-License-Identifier: Apache-2.0
"""The MoE block on GPUs as one custom VJP. What a forward leaves for its backward is an array of XLA's: scan, remat, offload and command buffers hold."""

from __future__ import annotations

import ctypes as c
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .. import _abi, _core, _device
from .._library import check
from ..config import MoeConfig
from . import _ffi, _local, _mesh

_SINGLE = ("router_bias", "b1", "b2")  # those that the layer takes, and gives gradients of, in float32
SAVED = "waybill_saved"  # checkpoint_name of what a forward leaves for its backward


class Setup(NamedTuple):
    config: MoeConfig
    axis_name: str | None
    P: int
    training: bool


_made: set[bytes] = set()
_number_of_groups = 0


def platform(x: Any, given: str | None) -> str:
    """"cpu" or "cuda": the caller's word, where x lies, or what JAX computes on by default (a traced x has no place yet)."""
    if given is None and isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        given = next(iter(x.devices())).platform
    if given is None:
        default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]  # jax declares none of its options
        given = default.platform if hasattr(default, "platform") else default or jax.default_backend()
    return "cuda" if given in ("gpu", "cuda") else "cpu"


def _settings(setup: Setup, T: int) -> tuple[_abi.MoeConfig, Any]:
    struct = _device.settings(setup.config, T)
    return struct, _ffi.config_bytes(struct)


def ensure(what: str, struct: Any, axis_name: str | None, P: int, indices: tuple[int, ...] = (0,)) -> _local.Group | None:
    """Makes the "layer" or "exchange" of these settings on this process's GPUs, once; where the group has several processes this is collective. Where the
    ranks are several GPUs of a process: the group that they are made from when the program is lowered.

    indices: there may be several of the same settings."""
    devices = _local_gpus()
    if not devices:
        raise RuntimeError("platform 'cuda', but this process has no CUDA device")
    if P > 1 and (jax.process_count() != P or len(devices) != 1):
        return _local.Group(f"wbx_make_local_{what}", type(struct), bytes(struct), axis_name, P, indices)
    for index in indices:
        _make(f"wbx_make_device_{what}", struct, P, index, devices)
    return None


def _local_gpus() -> list[Any]:
    return [device for device in jax.local_devices() if device.platform == "gpu"]


def _make(make: str, struct: Any, P: int, index: int, devices: list[Any]) -> None:
    global _number_of_groups
    key = make.encode() + bytes(struct) + P.to_bytes(4, "little") + index.to_bytes(4, "little")
    if key in _made:
        return
    group = None
    if P > 1:
        _device.check_environment()
        _number_of_groups += 1
        peers = _mesh.device_peers(_number_of_groups)
        # What differs is named on every process, before any of them waits for another inside the library.
        _core.name_difference(type(struct), _mesh.gather(_number_of_groups, make.removeprefix("wbx_make_device_"), bytes(struct)))
        port = peers.publish(_device.free_port() if peers.rank == 0 else 0)
        group = _abi.ProcessGroup(struct_size=c.sizeof(_abi.ProcessGroup), rank=peers.rank, size=P, device=devices[0].local_hardware_id, port=port,
                                  address=peers.address.encode())  # fmt: skip
    lib = _ffi.load()
    for device in devices:
        check(getattr(lib, make)(c.byref(struct), P, device.local_hardware_id, index, None if group is None else c.byref(group)))
    _made.add(key)


def _ensure(setup: Setup, struct: _abi.MoeConfig) -> _local.Group | None:
    return ensure("layer", struct, setup.axis_name, setup.P)


def _given(params: dict[str, jax.Array], mask: jax.Array | None, seed: jax.Array | None) -> int:
    names = [*(name in params for name in _abi.MOE_TENSORS), mask is not None, seed is not None]
    return sum(1 << index for index, given in enumerate(names) if given)


def _operands(x: jax.Array, params: dict[str, jax.Array], mask: jax.Array | None, seed: jax.Array | None) -> list[jax.Array]:
    narrow = [params[name].astype(jnp.float32 if name in _SINGLE else jnp.bfloat16) for name in _abi.MOE_TENSORS if name in params]
    return [x.astype(jnp.bfloat16), *narrow, *(array for array in (mask, seed) if array is not None)]


def _share(setup: Setup, mask: jax.Array | None) -> jax.Array | float:
    """[4]: what losses over all P T rows are multiplied by, so that they are those over the rows that are no padding."""
    if mask is None or not _device.has_losses(setup.config):
        return 1.0
    tokens, T = jnp.sum(mask == 0).astype(jnp.float32), mask.shape[0] * setup.P
    if setup.axis_name is not None:
        tokens = jax.lax.psum(tokens, setup.axis_name)
    one = jnp.where(tokens > 0, T / jnp.maximum(tokens, 1), 0)
    return jnp.stack([one * one, jnp.ones_like(one), one * one, one])


def _run(x: jax.Array, params: dict[str, jax.Array], mask: jax.Array | None, seed: jax.Array | None, setup: Setup, training: bool) -> tuple[Any, jax.Array]:
    (T, H), router = x.shape, setup.config.router
    struct, config = _settings(setup, T)
    saved = _device.saved_bytes(struct, setup.P)
    group = _ensure(setup, struct)
    results = (_ffi.shape((T, H), x.dtype), _ffi.shape((T, router.K), _ffi.id_dtype(router.E)), _ffi.shape((T, router.K)), _ffi.shape((router.E,), jnp.int32),
               _ffi.shape((4,)), _ffi.shape((6,), jnp.int32), _ffi.shape((saved if training else 0,), jnp.uint8))  # fmt: skip
    out, *stats, kept = _ffi.call("device_moe_forward", results, *_operands(x, params, mask, seed), given=_given(params, mask, seed), P=setup.P,
                                  training=training, config=config, group=group)  # fmt: skip
    ids, weights, counts, losses, status = stats
    losses = losses * _share(setup, mask) if setup.training else jnp.zeros_like(losses)
    return (out, (jnp.sum(losses), losses, ids, weights, counts, status)), kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def block(x: jax.Array, params: dict[str, jax.Array], mask: jax.Array | None, seed: jax.Array | None, setup: Setup) -> Any:
    """x [T, H] float32 or bfloat16, seed uint32 [2], low word first -> out [T, H], (loss, losses, ids, weights, counts, status)."""
    return _run(x, params, mask, seed, setup, setup.training and _device.has_losses(setup.config))[0]


def _forward(x: jax.Array, params: dict[str, jax.Array], mask: jax.Array | None, seed: jax.Array | None, setup: Setup) -> tuple[Any, Any]:
    results, kept = _run(x, params, mask, seed, setup, True)
    return results, (x, params, mask, seed, checkpoint_name(kept, SAVED))


def _backward(setup: Setup, residuals: Any, cotangents: Any) -> Any:
    x, params, mask, seed, kept = residuals
    d_out, (d_loss, d_losses, *_) = cotangents
    struct, config = _settings(setup, x.shape[0])
    group = _ensure(setup, struct)
    trained = [name for name in _abi.MOE_TENSORS if name in params and name != "router_bias"]
    results = (_ffi.shape(x.shape, x.dtype), *(_ffi.shape(params[name].shape, jnp.float32 if name in _SINGLE else params[name].dtype) for name in trained))
    if _device.has_losses(setup.config):
        factors = (d_loss + d_losses) * _share(setup, mask) if setup.training else jnp.zeros(4, jnp.float32)
        factors = factors[jnp.array(_device.loss_indices(setup.config))]
    else:
        factors = jnp.zeros(0, jnp.float32)
    dx, *gradients = _ffi.call("device_moe_backward", results, *_operands(x, params, mask, seed), kept, d_out.astype(jnp.bfloat16), factors,
                               given=_given(params, mask, seed), P=setup.P, config=config, group=group)  # fmt: skip
    spread = {name: gradient.astype(params[name].dtype) for name, gradient in zip(trained, gradients)}
    if "router_bias" in params:
        spread["router_bias"] = jnp.zeros_like(params["router_bias"])
    return dx, spread, None, None


block.defvjp(_forward, _backward)
