# SPDX-License-Identifier: Apache-2.0
"""The MoE block in plain eager mode: one autograd node and two calls of the library, with structs that are filled once.

The custom op of _block.py stays for everything else: torch.compile, transforms, saved-tensor hooks (checkpointing), bfloat16, padding masks and seeds.
Both compute the same bits.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.function import once_differentiable

from .. import _abi, _core
from .._library import check, library
from . import _block


class _Held:
    """A step that a graph owns; given back to its layer when backward has used it, or the graph is dropped."""

    __slots__ = ("layer", "step")

    def __init__(self, layer: _block.Layer, step: _core.MoeStep) -> None:
        self.layer = layer
        self.step: Any = step  # a step of the layer, None when given back

    def release(self) -> None:
        if self.step is not None:
            self.layer.give_back(self.step)
            self.step = None

    __del__ = release


def _tensor(shape: tuple[int, ...]) -> _abi.Tensor:
    struct = _abi.Tensor(dtype=_abi.F32, rank=len(shape))
    for axis, size in enumerate(shape):
        struct.shape[axis] = size
    return struct


class Calls:
    """The structs of a layer's calls. A layer serves one call at a time, so they are shared by all of them."""

    def __init__(self, layer: _block.Layer, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
        lib, config, ep = library(), layer.config, layer.core.ep
        self.names, self.shapes = names, shapes
        self.expected = tuple(tuple(dims) for dims in (config.shapes(ep.size)[name] for name in names))
        self.parameters, self.gradients = _abi.sized(_abi.MoeTensors), _abi.sized(_abi.MoeTensors)
        for name, dims in zip(names, shapes):
            setattr(self.parameters, name, _tensor(dims))
            if name != "router_bias":
                setattr(self.gradients, name, _tensor(dims))
        # Views into the two structs, in the order of the parameters.
        self.slots = [(getattr(self.parameters, name), getattr(self.gradients, name) if name != "router_bias" else None) for name in names]
        self.rows = [_tensor((0, config.H)) for _ in range(4)]  # x, out, d_out, dx
        self.references = [c.byref(row) for row in self.rows]
        self.parameter_reference, self.gradient_reference = c.byref(self.parameters), c.byref(self.gradients)
        self.training, self.evaluation = _abi.MoeForwardOptions(), _abi.MoeForwardOptions()
        for options in (self.training, self.evaluation):
            check(lib.wb_moe_forward_options_init(c.byref(options), c.sizeof(options)))
        self.training.training, self.evaluation.training = 1, 0
        self.options = {True: c.byref(self.training), False: c.byref(self.evaluation)}
        self.handle, self.forward, self.backward = layer.core.handle, lib.wb_moe_forward, lib.wb_moe_backward

    def point(self, tensors: tuple[Tensor, ...], x: Tensor) -> None:
        for (slot, _), tensor in zip(self.slots, tensors):
            slot.data = tensor.data_ptr()
        rows = self.rows[0]
        rows.data, rows.shape[0] = x.data_ptr(), x.shape[0]

    def run_forward(self, out: Tensor, step: _core.MoeStep, training: bool) -> None:
        rows = self.rows[1]
        rows.data, rows.shape[0] = out.data_ptr(), out.shape[0]
        status = self.forward(self.handle, self.parameter_reference, self.references[0], self.options[training], self.references[1], step.handle)
        if status:
            check(status)


def calls_for(layer: _block.Layer, tensors: dict[str, Tensor], x: Tensor, *others: Any) -> Calls | None:
    """The structs for these tensors, or None where the custom op must take the call."""
    if (x.dtype is not torch.float32 or type(x) is not Tensor or not x.is_contiguous() or not x.is_cpu or any(other is not None for other in others)
            or _are_functorch_transforms_active() or _len_torch_dispatch_stack() or _top_saved_tensors_default_hooks(True) is not None):  # fmt: skip
        return None
    for tensor in tensors.values():
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous() or not tensor.is_cpu:
            return None
    calls = layer.calls
    names = tuple(tensors)
    if calls is None or calls.names != names:
        calls = layer.calls = Calls(layer, names, tuple(tuple(tensor.shape) for tensor in tensors.values()))
    for dims, tensor in zip(calls.expected, tensors.values()):
        if tensor.shape != dims:
            return None  # refused there, with the text
    return calls


class Block(torch.autograd.Function):
    """x [T, H], parameters -> out [T, H]; the backward adds loss_scale times the gradient of the losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _block.Layer, calls: Calls, loss_scale: float, *tensors: Tensor) -> Tensor:
        out = torch.empty_like(x)
        held = _Held(layer, layer.take())
        calls.point(tensors, x)
        calls.run_forward(out, held.step, True)
        ctx.save_for_backward(x, *tensors)
        ctx.rest = held, layer, calls, loss_scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        return _backward_once(ctx, d_out) if torch.is_grad_enabled() else Block._backward(ctx, d_out)

    @staticmethod
    def _backward(ctx: Any, d_out: Tensor) -> Any:
        x, *tensors = ctx.saved_tensors
        held, layer, calls, loss_scale = ctx.rest
        calls.point(tensors, x)
        found = held.step is not None
        if layer.world.size > 1:  # the forward below is collective: all ranks make it, or none
            found = layer.world.all_reduce(int(found)) == layer.world.size
        if not found:  # a second backward: the same inputs give the same routes again
            if held.step is None:
                held.step = layer.take()
            calls.run_forward(torch.empty_like(x), held.step, True)
        results = [torch.zeros_like(tensor) if gradient is not None else None for (_, gradient), tensor in zip(calls.slots, tensors)]
        for (_, gradient), result in zip(calls.slots, results):
            if result is not None:
                gradient.data = result.data_ptr()
        d_out = d_out.contiguous()
        dx = torch.empty_like(x)
        for row, tensor in zip(calls.rows[2:], (d_out, dx)):
            row.data, row.shape[0] = tensor.data_ptr(), tensor.shape[0]
        status = calls.backward(calls.handle, calls.parameter_reference, calls.gradient_reference, calls.references[0], calls.references[2],
                                calls.references[3], held.step.handle, loss_scale)  # fmt: skip
        held.release()
        if status:
            check(status)
        return (dx, None, None, None, *results)


# Under create_graph=True: a second derivative is refused when it is asked for. The wrapper costs what a small layer's call does.
_backward_once = once_differentiable(Block._backward)


def evaluate(layer: _block.Layer, calls: Calls, x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    """The forward alone: nothing is saved, no loss is computed."""
    out = torch.empty_like(x)
    held = _Held(layer, layer.take())
    calls.point(tensors, x)
    calls.run_forward(out, held.step, False)
    return out
