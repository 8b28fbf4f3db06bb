# SPDX-License-Identifier: Apache-2.0
"""The XLA library: found, loaded and registered once; calls, and the place of a device in the group of a collective call."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _abi, _core
from .._library import has_cuda, library
from ..config import MoeConfig
from ..group import single
from . import _local, _mesh

TARGETS = ("router_forward", "router_losses", "router_backward", "grouped_matmul", "quantize", "dequantize", "dispatch", "combine", "combine_backward",
           "dispatch_start", "dispatch_done", "combine_start", "combine_done", "ticket", "moe_forward", "moe_backward", *(ON_DEVICES := (
               "device_moe_forward", "device_moe_backward", "device_dispatch", "device_combine", "device_combine_backward",
               "device_dispatch_start", "device_dispatch_done", "device_combine_start", "device_combine_done")))  # fmt: skip
# Those with a CUDA form; the others refuse arrays on a GPU.
CUDA_TARGETS = ("router_forward", "router_losses", "router_backward", "grouped_matmul", "quantize", "dequantize", *ON_DEVICES)


@functools.cache
def load() -> ctypes.CDLL:
    """Loads libwaybill_jax.so ($WAYBILL_JAX_LIBRARY or the package's) and registers its handlers. ImportError says what is missing."""
    library()  # first, and global: the XLA library finds its wb_* functions
    if not hasattr(jax, "ffi") or tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 9):
        raise ImportError(f"waybill.jax needs jax 0.9 or newer, found {jax.__version__}")
    path = os.environ.get("WAYBILL_JAX_LIBRARY") or str(pathlib.Path(__file__).parent.parent / "lib" / "libwaybill_jax.so")
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"waybill.jax: {error}. The XLA library is built where jaxlib's headers are found: pip install jax, then build Waybill again"
        ) from None
    lib.wbx_num_saved_steps.restype, lib.wbx_num_saved_steps.argtypes = ctypes.c_int64, []
    lib.wbx_clear_saved_steps.restype, lib.wbx_clear_saved_steps.argtypes = None, []
    c = ctypes
    lib.wbx_pending_counts.restype, lib.wbx_pending_counts.argtypes = None, [c.POINTER(c.c_int64)] * 3
    lib.wbx_mesh_listen.restype, lib.wbx_mesh_listen.argtypes = c.c_int, [c.c_char_p, c.c_char_p, c.POINTER(c.c_int), c.c_char_p, c.c_int]
    lib.wbx_mesh_set_peer.restype, lib.wbx_mesh_set_peer.argtypes = None, [c.c_uint32, c.c_char_p, c.c_int]
    for make, config in ((lib.wbx_make_device_layer, _abi.MoeConfig), (lib.wbx_make_device_exchange, _abi.ExchangeConfig)):
        make.restype, make.argtypes = c.c_int, [c.POINTER(config), c.c_int32, c.c_int32, c.c_int32, c.POINTER(_abi.ProcessGroup)]
    for make, config in ((lib.wbx_make_local_layer, _abi.MoeConfig), (lib.wbx_make_local_exchange, _abi.ExchangeConfig)):
        make.restype, make.argtypes = c.c_int, [c.POINTER(config), c.c_int32, c.POINTER(c.c_int32), c.POINTER(c.c_int32), c.c_int32]
    lib.wbx_set_process.restype, lib.wbx_set_process.argtypes = None, [c.c_int32]
    lib.wbx_device_pair_counts.restype, lib.wbx_device_pair_counts.argtypes = None, [c.POINTER(c.c_int64)] * 2
    lib.wbx_mesh_start.restype, lib.wbx_mesh_start.argtypes = None, [c.c_uint32, c.c_int64]
    for target in TARGETS:
        on_cpu = "wbx_refuse_cpu" if target in ON_DEVICES else f"wbx_{target}"
        jax.ffi.register_ffi_target(f"waybill_{target}", jax.ffi.pycapsule(getattr(lib, on_cpu)), platform="cpu")
        on_cuda = f"wbx_{target}_cuda" if target in CUDA_TARGETS and has_cuda() else "wbx_refuse_device"
        jax.ffi.register_ffi_target(f"waybill_{target}", jax.ffi.pycapsule(getattr(lib, on_cuda)), platform="CUDA")
    return lib


def call(target: str, results: Any, *operands: jax.Array, group: _local.Group | None = None, **attributes: Any) -> Any:
    """One FFI call. Batched calls (vmap) run one after another, in order, on every rank alike. group: the ranks are GPUs of one process."""
    load()
    # What comes from an array that differs between the devices of an axis differs, too; ffi_call wants equal marks and makes none.
    axes = frozenset().union(*(_varying_axes(operand) for operand in operands))
    operands = tuple(_vary_over(operand, axes) for operand in operands)
    if group is not None:
        outputs: Any = _local.call(target, results if isinstance(results, tuple) else (results,), group, *operands, **attributes)
        outputs = tuple(outputs) if isinstance(results, tuple) else outputs[0]
    else:
        if target in ON_DEVICES:
            attributes["groups"] = _local.NO_GROUPS
        outputs = jax.ffi.ffi_call(f"waybill_{target}", results, vmap_method="sequential")(*operands, **attributes)
    return jax.tree.map(lambda output: _vary_over(output, axes), outputs)


def shape(dims: Sequence[int], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(dims), dtype)


def config_bytes(struct: ctypes.Structure) -> np.ndarray:
    """A config struct as a constant of the program."""
    return np.frombuffer(bytes(struct), dtype=np.uint8)


@functools.cache
def check_block(config: MoeConfig, T: int) -> None:
    """ValueError, with the library's text, of a block that brings T tokens: where it is traced, not when it runs. The layer of one rank with these settings is
    made, and dropped."""
    _core.MoeLayer(dataclasses.replace(config, T_max=config.T_max or T), single())


def axis_size(axis_name: str | None) -> int:
    """Devices along the axis, 1 without one. ValueError outside of shard_map over such an axis."""
    if axis_name is None:
        return 1
    try:
        return int(jax.lax.axis_size(axis_name))
    except NameError:
        raise ValueError(f"axis {axis_name!r} is not bound; call this inside jax.shard_map over a mesh with that axis") from None


def place(op: str, axis_name: str | None, config: np.ndarray, operands: Sequence[jax.Array], *extra: jax.Array) -> jax.Array:
    """uint32 [1 + 3 P + ...]: this device's rank on the axis, the tickets of all its devices, then `extra`; see bindings/jax/meeting.h.

    A ticket numbers one execution of one call. All devices learn the first one's by a collective of XLA, which pairs the calls of a program by
    itself; so the ranks of a call meet whatever the order in which devices come to the calls, and calls of one traced function stay apart.
    """
    if axis_size(axis_name) == 1:
        head = jnp.zeros(4, jnp.uint32)
    else:
        _mesh.ensure(load())
        ticket = call("ticket", shape((3,), jnp.uint32), *(jax.lax.stop_gradient(operand) for operand in operands), op=op, config=config)
        rank = jax.lax.axis_index(axis_name).astype(jnp.uint32).reshape(1)
        head = jnp.concatenate([rank, jax.lax.all_gather(ticket, axis_name).reshape(-1)])
    return jnp.concatenate([head, *(value.astype(jnp.uint32).reshape(-1) for value in extra)]) if extra else head


def _varying_axes(array: jax.Array) -> frozenset[str]:
    kind = jax.typeof(array)
    marks = getattr(kind, "mat", None)  # jax 0.10; before, the axes themselves
    return frozenset(marks.varying if marks is not None else getattr(kind, "vma", ()))


def _vary_over(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - _varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def varying(tree: Any, axis_name: str | None) -> Any:
    """Marks replicated arrays as different on each device (also along the mesh's other axes), so that their cotangents are summed over it.

    shard_map(check_vma=False) leaves the marks out and sums by itself.
    """
    if axis_name is None:
        return tree
    axes = {axis_name}
    for name in jax.sharding.get_abstract_mesh().axis_names:
        try:
            jax.lax.axis_index(name)
        except NameError:  # an axis that the compiler shards, not the caller
            continue
        axes.add(name)
    return jax.tree.map(lambda array: _vary_over(array, frozenset(axes)), tree)


def check(array: Any, name: str, dtypes: Sequence[Any], dims: Sequence[int | str | None], *, on_gpu: bool = False) -> None:
    """Dtype and shape at trace time; a concrete array where this op does not run (on_gpu: it has a CUDA form) is refused here, a traced one when it runs."""
    from .._tensor import check_shape

    if not isinstance(array, (jax.Array, np.ndarray)) and not hasattr(array, "dtype"):
        raise TypeError(f"{name} is {type(array).__name__}, an array is needed")
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        wrong = {device.platform for device in array.devices()} - ({"cpu", "gpu"} if on_gpu and has_cuda() else {"cpu"})
        if wrong:
            what = "this op" if has_cuda() else "this build of Waybill"
            raise NotImplementedError(f"{name} is on {', '.join(sorted(wrong))}; {what} computes on the CPU only")
    if array.dtype not in [jnp.dtype(dtype) for dtype in dtypes]:
        raise ValueError(f"{name} is {array.dtype}, allowed are {', '.join(jnp.dtype(dtype).name for dtype in dtypes)}")
    check_shape(array.shape, name, dims)


FLOATS = (jnp.float32, jnp.bfloat16)


def id_dtype(E: int) -> Any:
    return jnp.int16 if E <= 32768 else jnp.int32
