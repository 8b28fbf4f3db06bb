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
from torch.nn.modules import module as nn

from .. import _abi
from .._library import check, torch_library

_NAME = b"waybill.plan"


class Plan(c.Structure):
    """As in bindings/torch/block_calls.cc."""

    _fields_ = [("exchange", c.c_void_p), ("forward", c.c_void_p), ("backward", c.c_void_p), ("layer", c.c_void_p),
                ("empty_like", c.py_object), ("empty", c.py_object), ("empty_arguments", c.py_object * 12), ("room", c.py_object),
                ("tensor_type", c.py_object), ("apply", c.py_object), ("slow_backward", c.py_object), ("check", c.py_object),
                ("is_grad_enabled", c.py_object), ("transforms", c.py_object * 2), ("requires_grad", c.py_object), ("to_save", c.py_object),
                ("saved_tensors", c.py_object), ("rest", c.py_object), ("device_type", c.c_int32), ("device_id", c.c_int32), ("num_parameters", c.c_int32),
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


def _new_function(method: _Method, owner: Any) -> Any:
    return _python("PyCFunction_NewEx", c.py_object, c.c_void_p, c.py_object, c.c_void_p)(c.addressof(method), owner, None)


@functools.cache
def _equip(node: Any, lib: c.CDLL) -> None:
    """Gives an autograd.Function the forward and backward of the library."""
    methods = (_Method * 4).in_dll(lib, "wbt_node_methods")
    node.forward = _new_function(methods[1], None)
    # What the engine calls; the class's own looks up node.backward, which stays for second derivatives and compiled autograd.
    node._backward_cls.apply = _python("PyDescr_NewMethod", c.py_object, c.py_object, c.c_void_p)(node._backward_cls, c.addressof(methods[2]))


# Where a module of waybill.torch.MoE has what a plan calls so: submodule, kind, name.
_PLACES = {"gate": ("gate", "_parameters", "weight"), "router_bias": ("gate", "_buffers", "e_score_correction_bias"),
           "w1": ("experts", "_parameters", "gate_up_proj"), "w2": ("experts", "_parameters", "down_proj"),
           "b1": ("experts", "_parameters", "gate_up_proj_bias"), "b2": ("experts", "_parameters", "down_proj_bias"),
           "latent_down": (None, "_parameters", "latent_down"), "latent_up": (None, "_parameters", "latent_up")}  # fmt: skip


@functools.cache
def module_call(names: tuple[str, ...]) -> Any:
    """call(a module's __dict__, x) -> out, or None where the call is not plain; None where it is not available: a shared expert's halves are joined first."""
    found = _load()
    if found is None or any(name not in _PLACES for name in names):
        return None
    looked_up = ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward", "_compiled_call_impl"]
    hooks = [getattr(nn, f"_global{name}") for name in looked_up[:4]]
    places = [part if part is None else sys.intern(part) for name in names for part in _PLACES[name]]
    owner = (*map(sys.intern, looked_up), *hooks, *map(sys.intern, ["training", "loss_scale", "_last_states", "_modules"]), 0.0, *places)
    return _new_function((_Method * 4).in_dll(found[0], "wbt_node_methods")[3], owner)


class Bound:
    """Owner of a plan; must outlive its functions. functions: accept, train, evaluate, gradients, step."""

    def __init__(self, lib: c.CDLL, plan: Plan) -> None:
        self.plan = plan
        self.capsule = _python("PyCapsule_New", c.py_object, c.c_void_p, c.c_char_p, c.c_void_p)(c.addressof(plan), _NAME, None)
        methods = [*(_Method * 4).in_dll(lib, "wbt_methods"), (_Method * 4).in_dll(lib, "wbt_node_methods")[0]]
        self.functions = tuple(_new_function(method, self.capsule) for method in methods)


def _dense(tensor: Any) -> tuple[Any, ...]:
    """(sizes, strides, dtype) of a contiguous tensor of this one's shape."""
    strides, sizes = [1], tuple(tensor.shape)
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * max(size, 1))
    return sizes, tuple(reversed(strides)), tensor.dtype


def _empty(device: int) -> Any:
    """The allocation that torch.compile's programs use: no dispatcher, no named arguments. None where this PyTorch has none."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, "_empty_strided_cuda" if device >= 0 else "_empty_strided_cpu", None)


def bind(layer: Any, node: Any, forward: Any, backward: Any, names: tuple[str, ...], tensors: tuple[Any, ...], parameters: Any, gradients: Any,
         rows: list[Any], saved: Any, trained: Any, evaluated: Any, options: list[Any], stream: Any, x: Any) -> Bound | None:  # fmt: skip
    """The functions for structs that lack only pointers; they stay valid while the result lives. None where they are not available."""
    found = _load()
    if found is None or x.dim() > 8:
        return None
    lib, exchange = found
    _equip(node, lib)
    plan = Plan(exchange=exchange, forward=c.cast(forward, c.c_void_p).value, backward=c.cast(backward, c.c_void_p).value,
                layer=layer.core.handle.value, empty_like=torch.empty_like, room=layer.bytes, tensor_type=torch.Tensor,
                apply=super(torch.autograd.Function, node).apply, slow_backward=node.backward, check=check, is_grad_enabled=torch.is_grad_enabled,
                requires_grad=sys.intern("requires_grad"), to_save=sys.intern("to_save"), saved_tensors=sys.intern("saved_tensors"), rest=sys.intern("rest"),
                device_type=2 if layer.device >= 0 else 1, device_id=max(layer.device, 0), num_parameters=len(names), x_rank=x.dim(), parameters=parameters,
                gradients=gradients, x=rows[0], d_out=rows[2], dx=rows[3], saved=saved, training=trained, evaluation=evaluated, options=options[0],
                evaluation_options=options[1], stream=stream)  # fmt: skip
    plan.transforms[:] = [torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack]
    empty = _empty(layer.device)
    if empty is not None:
        plan.empty = empty
    for index, tensor in enumerate((x, layer.bytes, *tensors)):
        plan.empty_arguments[index] = _dense(tensor)
    for index, name in enumerate(names):
        plan.fields[index], plan.trained[index] = _abi.MOE_TENSORS.index(name), name != "router_bias"
    for axis, size in enumerate(x.shape):
        plan.x_shape[axis] = size
    return Bound(lib, plan)
