# SPDX-License-Identifier: Apache-2.0
"""Ops whose ranks are several GPUs of one process. Which device is which rank is known when a program is lowered, from the mesh of its shard_map: the ranks of
each group are made then, by one call, and the program carries the groups as an attribute, so that a handler finds its rank by the device it runs on."""

from __future__ import annotations

import ctypes
import inspect
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from .. import _device
from .._library import check

NO_GROUPS = np.full(1, -1, np.int32)  # the attribute of programs whose processes are one rank each


class Group(NamedTuple):
    """What the ranks of a call are made of, known when it is traced. make: the XLA library's function; indices: those of the handles that the call may need."""

    make: str
    struct: type[ctypes.Structure]
    config: bytes
    axis_name: Any
    P: int
    indices: tuple[int, ...]


_lock = threading.Lock()
_made: set[tuple[Any, ...]] = set()


def groups_of(mesh: Any, axis_name: Any, P: int) -> np.ndarray:
    """int32 [groups, P, 2]: process and local number of each rank's GPU, for each place along the mesh's other axes. The errors say what cannot be served."""
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(f"axis {axis_name!r}: which GPUs its {P} ranks are is not known; give jax.shard_map a jax.sharding.Mesh, or jax.set_mesh(mesh)")
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    order = [mesh.axis_names.index(name) for name in names]
    rows = np.moveaxis(mesh.devices, order, range(-len(order), 0)).reshape(-1, P)
    places = [[_place(device) for device in row] for row in rows]
    for row in places:
        platforms, processes = sorted({place[0] for place in row}), sorted({place[1] for place in row})
        if platforms != ["gpu"]:
            raise RuntimeError(f"platform 'cuda', but the devices of axis {axis_name!r} are {', '.join(platforms)}")
        if len(processes) > 1:
            raise NotImplementedError(f"axis {axis_name!r} has {P} GPUs of processes {', '.join(map(str, processes))}; on GPUs an axis lies within a process, "
                                      f"or it has all processes of one GPU each, in their order")  # fmt: skip
    return np.array([[place[1:] for place in row] for row in places], np.int32)


def _place(device: Any) -> tuple[str, int, int]:
    return device.platform, device.process_index, device.local_hardware_id


def make(group: Group, groups: np.ndarray) -> None:
    """Makes the ranks of this process's groups, once. Waits for their devices."""
    from . import _ffi

    lib, me = _ffi.load(), jax.process_index()
    struct = group.struct.from_buffer_copy(group.config)
    with _lock:
        for row in groups[groups[:, 0, 0] == me]:
            devices = (ctypes.c_int32 * group.P)(*row[:, 1].tolist())
            for index in group.indices:
                key = (group.make, group.config, index, tuple(devices))
                if key in _made:
                    continue
                _device.check_local_environment()
                lib.wbx_set_process(me)
                check(getattr(lib, group.make)(ctypes.byref(struct), group.P, devices, devices, index))
                _made.add(key)


def call(target: str, results: tuple[Any, ...], group: Group, *operands: jax.Array, **attributes: Any) -> list[jax.Array]:
    """One FFI call of each rank of `group`. Batched calls (vmap) run one after another, in order, on every rank alike."""
    given = tuple(sorted((name, _Bytes(value.tobytes()) if isinstance(value, np.ndarray) else value) for name, value in attributes.items()))
    shapes = tuple((tuple(result.shape), jnp.dtype(result.dtype)) for result in results)
    # The mesh is among what tells two calls apart: other axes, other groups.
    return _call.bind(*operands, target=target, results=shapes, group=group, attributes=given, mesh=jax.sharding.get_abstract_mesh())


class _Bytes(bytes):
    """A uint8 array among the attributes."""


def _abstract(*_: Any, results: tuple[Any, ...], **__: Any) -> list[Any]:
    return [jax.core.ShapedArray(dims, dtype) for dims, dtype in results]


def _lower_with(groups: np.ndarray, context: Any, operands: Any, target: str, attributes: tuple[tuple[str, Any], ...]) -> Any:
    arrays = {name: np.frombuffer(value, np.uint8) if isinstance(value, _Bytes) else value for name, value in attributes}
    return jax.ffi.ffi_lowering(f"waybill_{target}")(context, *operands, groups=groups.reshape(-1), **arrays)


def _lower_cuda(context: Any, *operands: Any, target: str, group: Group, attributes: tuple[tuple[str, Any], ...], **_: Any) -> Any:
    groups = groups_of(getattr(context.module_context.axis_context, "mesh", None), group.axis_name, group.P)
    make(group, groups)
    return _lower_with(groups, context, operands, target, attributes)


def _lower_other(context: Any, *operands: Any, target: str, attributes: tuple[tuple[str, Any], ...], **_: Any) -> Any:
    return _lower_with(NO_GROUPS, context, operands, target, attributes)  # refused when it runs


def _batch(operands: Any, dims: Any, **parameters: Any) -> tuple[Any, Any]:
    batched = {i: jnp.moveaxis(operand, dim, 0) for i, (operand, dim) in enumerate(zip(operands, dims)) if dim is not None}

    def one(element: dict[int, jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(_call.bind(*(element.get(i, operand) for i, operand in enumerate(operands)), **parameters))

    results = jax.lax.map(one, batched)
    return results, (0,) * len(results)


_call = Primitive("waybill_local_call")
_call.multiple_results = True
_call.def_abstract_eval(_abstract)
_call.def_impl(lambda *operands, **parameters: jax.jit(lambda *given: _call.bind(*given, **parameters))(*operands))
batching.primitive_batchers[_call] = _batch
# The lowering depends on the mesh around it, which JAX's cache of lowerings does not know.
_options = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}
mlir.register_lowering(_call, _lower_other, **_options)
mlir.register_lowering(_call, _lower_cuda, platform="cuda", **_options)
