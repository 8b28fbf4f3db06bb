# SPDX-License-Identifier: Apache-2.0
"""The MoE block on CUDA tensors in plain eager mode: one autograd node, structs that are filled once, and per call only the pointers.

The custom op of _device.py stays for everything else: torch.compile, transforms, padding masks, seeds. Both compute the same bits.
"""

from __future__ import annotations

import ctypes as c
import threading
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.autograd.function import once_differentiable

from .. import _abi
from .._library import check, library
from . import _device, _fast

_BF16 = torch.bfloat16
_cuda_getCurrentRawStream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a build of PyTorch without CUDA has none
_OTHER_LAYOUT = -1  # status of a backward whose d_out is not contiguous bfloat16


def _data(owner: Any) -> Any:
    """The field `data` of a wb_tensor, to be set without looking it up."""
    return c.c_void_p.from_buffer(owner, _abi.Tensor.data.offset)


class Calls:
    """The calls of a layer with an x and parameters like these.

    step(state, x, *parameters) -> out, recorded by autograd where it has to be; None where the call is not plain or not as it was. state:
    states[loss scale]. It is made of accept(x, *parameters): whether all is as it was; train(x, *parameters) -> (out, saved),
    evaluate(x, *parameters) -> out, gradients((x, saved, *parameters), d_out[, loss weights]) -> what the node's backward returns; these three return
    the wb_status of a call that failed.
    The functions of libwaybill_torch.so where it and PyTorch allow it, else those below, which cost more of the host's time.
    """

    def __init__(self, layer: _device.Layer, names: tuple[str, ...], tensors: tuple[Tensor, ...], x: Tensor) -> None:
        self.names = names
        self.layer, self.device, self.dtype, self.shape = layer, layer.device, x.dtype, x.shape
        self._expected = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._taken = [_device.dtype_in(name) for name in names]
        self._converts = x.dtype is not _BF16 or any(tensor.dtype is not dtype for tensor, dtype in zip(tensors, self._taken))
        self.bytes = layer.bytes
        self._trained = [name != "router_bias" for name in names]
        self._wide_sums = [name in ("b1", "b2") and tensor.dtype is not torch.float32 for name, tensor in zip(names, tensors)]
        T, kinds = x.numel() // layer.config.H, _device.ROW_DTYPES
        layer.check_rows(T)
        self._lock = threading.Lock()  # keeps pointers and their call together
        # Functions of their own without argument types: they get references and pointers made below, and a check of each costs half a microsecond.
        self._forward, self._backward = (library()[name] for name in ("wb_device_moe_forward", "wb_device_moe_backward"))
        self._factors, self._no_factors = c.c_void_p(), c.c_void_p()
        parameters, gradients = _abi.sized(_abi.MoeTensors), _abi.sized(_abi.MoeTensors)
        again = _abi.sized(_abi.MoeTensors)  # the backward's own: another thread than the forward's may run it
        for name, tensor, dtype in zip(names, tensors, self._taken):
            for structs in (parameters, again):
                setattr(structs, name, layer.array(kinds[dtype], *tensor.shape))
            if name != "router_bias":
                setattr(gradients, name, layer.array(kinds[_device.gradient_dtype(name, tensor)], *tensor.shape))
        rows = [layer.array(kinds[x.dtype if i == 3 else _BF16], T, layer.config.H) for i in range(4)]  # x of either direction, d_out, dx
        saved = layer.array(_abi.U8, layer.saved_bytes)
        trained, evaluated = (_abi.sized(_abi.DeviceMoeOutputs) for _ in range(2))
        trained.out = evaluated.out = rows[3]
        trained.saved = saved
        options = [layer.new_options(training) for training in (1, 0)]
        streams = [layer.new_stream() for _ in range(2)]
        handle, ref = layer.core.handle, c.byref
        self._train = (handle, ref(parameters), ref(rows[0]), ref(options[0]), ref(trained), ref(streams[0]))
        self._evaluate = (handle, ref(parameters), ref(rows[0]), ref(options[1]), ref(evaluated), ref(streams[0]))
        self._both = (handle, ref(again), ref(gradients), ref(rows[1]), ref(rows[2]), ref(rows[3]), ref(options[0]), ref(saved))
        self._streams = [c.c_void_p.from_buffer(stream, _abi.Stream.native.offset) for stream in streams]
        self._back_stream = ref(streams[1])
        self._weights = [_data(getattr(parameters, name)) for name in names]
        self._weights_again = [_data(getattr(again, name)) for name in names]
        self._sums = [_data(getattr(gradients, name)) if name != "router_bias" else None for name in names]
        self._x, self._x_again, self._d_out, self._dx = (_data(row) for row in rows)
        self._out, self._out_alone, self._to, self._from = _data(trained.out), _data(evaluated.out), _data(trained.saved), _data(saved)
        self.fast = None
        if not self._converts:
            self.fast = _fast.bind(layer, FastBlock, self._forward, self._backward, names, tensors, parameters, gradients, rows, saved, trained, evaluated,
                                   options, streams[0], x)  # fmt: skip
        if self.fast is not None:
            self.accept, self.train, self.evaluate, self.gradients, self.step = self.fast.functions  # type: ignore[method-assign]
        self.states = States(self)

    def step(self, state: tuple[Any, ...], x: Tensor, *tensors: Tensor) -> Tensor | None:
        if type(x) is not Tensor or _are_functorch_transforms_active() or _len_torch_dispatch_stack() or not self.accept(x, *tensors):
            return None
        if torch.is_grad_enabled() and (x.requires_grad or any([tensor.requires_grad for tensor in tensors])):
            return Block.apply(x, state, *tensors)  # type: ignore[no-any-return]
        return evaluate(x, self, tensors)

    def accept(self, x: Tensor, *tensors: Tensor) -> Any:
        if x.dtype is not self.dtype or x.shape != self.shape or not x.is_contiguous() or x.data_ptr() % 16 or x.get_device() != self.device:
            return False
        for tensor, (shape, dtype) in zip(tensors, self._expected):
            if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.get_device() != self.device:
                return False
        return True

    def _narrow(self, x: Tensor, tensors: Any) -> tuple[Tensor, Any]:
        """As the layer takes them; the copies live until the call is queued (the allocator orders memory by stream)."""
        if self._converts:
            return x.to(_BF16), [tensor.to(dtype) for tensor, dtype in zip(tensors, self._taken)]
        return x, tensors

    def train(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor] | int:
        out, saved = torch.empty_like(x), torch.empty_like(self.bytes)
        return self._run_forward(x, tensors, out, saved) or (out, saved)

    def evaluate(self, x: Tensor, *tensors: Tensor) -> Tensor | int:
        out = torch.empty_like(x)
        status = self._run_forward(x, tensors, out, None)
        return status if status else out

    def _run_forward(self, x: Tensor, tensors: tuple[Tensor, ...], out: Tensor, saved: Tensor | None) -> int:
        x, narrow = self._narrow(x, tensors)
        with self._lock:
            for target, tensor in zip(self._weights, narrow):
                target.value = tensor.data_ptr()
            self._x.value, self._streams[0].value = x.data_ptr(), _cuda_getCurrentRawStream(self.device)
            if saved is None:
                self._out_alone.value = out.data_ptr()
                return int(self._forward(*self._evaluate))
            self._out.value, self._to.value = out.data_ptr(), saved.data_ptr()
            return int(self._forward(*self._train))

    def gradients(self, given: tuple[Tensor, ...], d_out: Tensor, *weights: Tensor) -> tuple[Tensor | None, ...] | int:
        if d_out.dtype is not _BF16 or not d_out.is_contiguous():
            return _OTHER_LAYOUT
        x, saved, *tensors = given
        dx = torch.empty_like(x)
        sums = [torch.empty_like(tensor, dtype=torch.float32 if wide else None) if has else None
                for tensor, has, wide in zip(tensors, self._trained, self._wide_sums)]  # fmt: skip
        x, narrow = self._narrow(x, tensors)
        with self._lock:
            for target, tensor in zip(self._weights_again, narrow):
                target.value = tensor.data_ptr()
            for target, total in zip(self._sums, sums):
                if target is not None and total is not None:
                    target.value = total.data_ptr()
            self._x_again.value, self._d_out.value, self._dx.value, self._from.value = x.data_ptr(), d_out.data_ptr(), dx.data_ptr(), saved.data_ptr()
            self._streams[1].value = _cuda_getCurrentRawStream(self.device)
            factors = self._no_factors
            if weights:
                factors = self._factors
                factors.value = weights[0].data_ptr()
            status = int(self._backward(*self._both, factors, self._back_stream))
        if status:
            return status
        return (dx, None, *[total.to(tensor.dtype) if total is not None else None for tensor, total in zip(tensors, sums)])

    def loss_weights(self, scale: float) -> Tensor | None:
        return self.layer.constant(scale)


class States(dict[float, tuple[Any, ...]]):
    """By loss scale: what a node keeps beside its tensors, (calls, loss scale, plan, None or function(loss scale) -> loss weights)."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __missing__(self, scale: float) -> tuple[Any, ...]:
        calls = self._calls
        if len(self) >= 64:  # a scale of every step's own
            self.clear()
        plan = calls.fast.capsule if calls.fast is not None else None
        state = self[scale] = calls, scale, plan, None if scale == 1.0 or not calls.layer.has_losses else calls.loss_weights
        return state


class Block(torch.autograd.Function):
    """x [..., H], a state, parameters -> out; the backward adds the state's loss scale times the gradient of the losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        result = state[0].train(x, *tensors)
        if result.__class__ is int:
            check(result)
        out, saved = result
        ctx.save_for_backward(x, saved, *tensors)
        ctx.rest = state
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _backward_once(ctx, d_out)
        calls, loss_scale, _, weights_of = ctx.rest
        weights = () if weights_of is None else (weights_of(loss_scale),)
        result = calls.gradients(ctx.saved_tensors, d_out, *weights)
        if result.__class__ is int:
            if result == _OTHER_LAYOUT:
                result = calls.gradients(ctx.saved_tensors, d_out.to(_BF16).contiguous(), *weights)
            if result.__class__ is int:
                check(result)
        return result


# A second derivative is refused when it is asked for.
_backward_once = once_differentiable(Block.backward)


class FastBlock(Block):
    """The same node for calls with builtin functions: its forward and what the engine calls of it are builtin too (_fast.py)."""


def evaluate(x: Tensor, calls: Calls, tensors: tuple[Tensor, ...]) -> Tensor:
    """The forward alone: nothing is saved, no loss is computed."""
    out: Any = calls.evaluate(x, *tensors)
    if out.__class__ is int:
        check(out)
    return out  # type: ignore[no-any-return]
