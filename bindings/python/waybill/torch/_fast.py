# SPDX-License-Identifier: Apache-2.0
"""libwaybill_torch.so: the calls of _plain.py as builtin functions that read PyTorch's tensors through its table of C functions (DLPack 1.3).

Optional: without the library, or with a PyTorch that has no such table (before 2.10), _plain.py sets the pointers itself.
"""

from __future__ import annotations

import ctypes as c
import functools
import sys
from typing import Any

import torch

from .. import _abi
from .._library import torch_library

_NAME = b"waybill.plan"


class Plan(c.Structure):
    """As in bindings/torch/block_calls.cc."""

    _fields_ = [("exchange", c.c_void_p), ("forward", c.c_void_p), ("backward", c.c_void_p), ("layer", c.c_void_p),
                ("empty_like", c.py_object), ("room", c.py_object), ("device_type", c.c_int32), ("device_id", c.c_int32), ("num_parameters", c.c_int32),
                ("x_rank", c.c_int32), ("fields", c.c_int32 * 10), ("trained", c.c_int32 * 10), ("x_shape", c.c_int64 * 8),
                ("parameters", _abi.MoeTensors), ("gradients", _abi.MoeTensors), ("x", _abi.Tensor), ("d_out", _abi.Tensor), ("dx", _abi.Tensor),
                ("saved", _abi.Tensor), ("training", _abi.DeviceMoeOutputs), ("evaluation", _abi.DeviceMoeOutputs), ("options", _abi.MoeForwardOptions),
                ("evaluation_options", _abi.MoeForwardOptions), ("stream", _abi.Stream)]  # fmt: skip


class _Exchange(c.Structure):
    _fields_ = [("major", c.c_uint32), ("minor", c.c_uint32), ("previous", c.c_void_p), ("allocate", c.c_void_p), ("managed_from_object", c.c_void_p),
                ("managed_to_object", c.c_void_p), ("tensor_from_object", c.c_void_p), ("current_stream", c.c_void_p)]  # fmt: skip


class _Method(c.Structure):
    _fields_ = [("name", c.c_char_p), ("function", c.c_void_p), ("flags", c.c_int), ("doc", c.c_char_p)]


@functools.cache
def _python(name: str, result: Any, *arguments: Any) -> Any:
    """A function of Python's, with a prototype of our own: those of c.pythonapi's attributes belong to the whole process."""
    return c.PYFUNCTYPE(result, *arguments)((name, c.pythonapi))


@functools.cache
def _load() -> tuple[c.CDLL, int] | None:
    """The library and the address of PyTorch's table; None where one of them is missing or not of this version."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if sys.implementation.name != "cpython" or capsule is None:
        return None
    try:
        address = _python("PyCapsule_GetPointer", c.c_void_p, c.py_object, c.c_char_p)(capsule, b"dlpack_exchange_api")
    except ValueError:
        return None
    table = _Exchange.from_address(address)
    if table.major != 1 or not table.tensor_from_object or not table.current_stream:
        return None
    found = torch_library()
    if found is None:
        return None
    lib = c.CDLL(found)
    if c.c_uint64.in_dll(lib, "wbt_plan_size").value != c.sizeof(Plan):
        return None  # of another version: ctypes needs none
    return lib, address


def available() -> bool:
    return _load() is not None


class Bound:
    """Owner of a plan; must outlive its functions."""

    def __init__(self, lib: c.CDLL, plan: Plan) -> None:
        self.plan = plan
        capsule = _python("PyCapsule_New", c.py_object, c.c_void_p, c.c_char_p, c.c_void_p)(c.addressof(plan), _NAME, None)
        new = _python("PyCFunction_NewEx", c.py_object, c.c_void_p, c.py_object, c.c_void_p)
        methods = (_Method * 4).in_dll(lib, "wbt_methods")
        self.functions = tuple(new(c.addressof(method), capsule, None) for method in methods)


def bind(layer: Any, forward: Any, backward: Any, names: tuple[str, ...], parameters: Any, gradients: Any, rows: list[Any], saved: Any, trained: Any,
         evaluated: Any, options: list[Any], stream: Any, x_shape: torch.Size) -> Bound | None:  # fmt: skip
    """The functions for structs that lack only pointers; they stay valid while the result lives. None where they are not available."""
    found = _load()
    if found is None or len(x_shape) > 8:
        return None
    lib, exchange = found
    plan = Plan(exchange=exchange, forward=c.cast(forward, c.c_void_p).value, backward=c.cast(backward, c.c_void_p).value,
                layer=layer.core.handle.value, empty_like=torch.empty_like, room=layer.bytes, device_type=2 if layer.device >= 0 else 1,
                device_id=max(layer.device, 0), num_parameters=len(names), x_rank=len(x_shape), parameters=parameters, gradients=gradients, x=rows[0],
                d_out=rows[2], dx=rows[3], saved=saved, training=trained, evaluation=evaluated, options=options[0], evaluation_options=options[1],
                stream=stream)  # fmt: skip
    for index, name in enumerate(names):
        plan.fields[index], plan.trained[index] = _abi.MOE_TENSORS.index(name), name != "router_bias"
    for axis, size in enumerate(x_shape):
        plan.x_shape[axis] = size
    return Bound(lib, plan)
