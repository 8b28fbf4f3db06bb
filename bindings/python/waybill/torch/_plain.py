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
from torch._C import _are_functorch_transforms_active, _cuda_getCurrentRawStream, _len_torch_dispatch_stack
from torch.autograd.function import once_differentiable

from .. import _abi
from .._library import check, library
from . import _device

_BF16 = torch.bfloat16


def _data(owner: Any) -> Any:
    """The field `data` of a wb_tensor, to be set without looking it up."""
    return c.c_void_p.from_buffer(owner, _abi.Tensor.data.offset)


class Calls:
    """The calls of a layer with an x and parameters like these. The lock keeps pointers and their call together."""

    def __init__(self, layer: _device.Layer, names: tuple[str, ...], tensors: tuple[Tensor, ...], x: Tensor) -> None:
        self.layer, self.device, self.lock, self.dtype = layer, layer.device, threading.Lock(), x.dtype
        self.expected = [(tensor.shape, tensor.dtype) for tensor in tensors]
        taken = [_device.dtype_in(name) for name in names]
        self._taken = taken if any(tensor.dtype is not dtype for tensor, dtype in zip(tensors, taken)) else None
        T, kinds = x.numel() // layer.config.H, _device.ROW_DTYPES
        layer.check_rows(T)
        self._bytes = layer.bytes
        # Functions of their own without argument types: they get references and pointers made below, and a check of each costs half a microsecond.
        self._forward, self._backward = (library()[name] for name in ("wb_device_moe_forward", "wb_device_moe_backward"))
        self._factors, self._no_factors = c.c_void_p(), c.c_void_p()
        parameters, gradients = _abi.sized(_abi.MoeTensors), _abi.sized(_abi.MoeTensors)
        again = _abi.sized(_abi.MoeTensors)  # the backward's own: another thread than the forward's may run it
        for name, tensor, dtype in zip(names, tensors, taken):
            for structs in (parameters, again):
                setattr(structs, name, layer.array(kinds[dtype], *tensor.shape))
            if name != "router_bias":
                setattr(gradients, name, layer.array(kinds[_device.gradient_dtype(name, tensor)], *tensor.shape))
        self._narrow_sums = [name in ("b1", "b2") and tensor.dtype is not torch.float32 for name, tensor in zip(names, tensors)]
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

    def accept(self, x: Tensor, tensors: tuple[Tensor, ...]) -> bool:
        """Whether nothing traces, transforms or wraps this call, and all is as it was."""
        if (x.dtype is not self.dtype or type(x) is not Tensor or not x.is_contiguous() or x.data_ptr() % 16 or x.get_device() != self.device
                or _are_functorch_transforms_active() or _len_torch_dispatch_stack()):  # fmt: skip
            return False
        for tensor, (shape, dtype) in zip(tensors, self.expected):
            if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.get_device() != self.device:
                return False
        return True

    def forward(self, x: Tensor, tensors: tuple[Tensor, ...], out: Tensor, saved: Tensor | None) -> None:
        if self.dtype is not _BF16:
            x = x.to(_BF16)
        if self._taken is not None:  # the copies live until the call is queued; the allocator orders memory by stream
            tensors = tuple([tensor.to(dtype) for tensor, dtype in zip(tensors, self._taken)])
        with self.lock:
            for target, tensor in zip(self._weights, tensors):
                target.value = tensor.data_ptr()
            self._x.value, self._streams[0].value = x.data_ptr(), _cuda_getCurrentRawStream(self.device)
            if saved is None:
                self._out_alone.value = out.data_ptr()
                status = self._forward(*self._evaluate)
            else:
                self._out.value, self._to.value = out.data_ptr(), saved.data_ptr()
                status = self._forward(*self._train)
        if status:
            check(status)

    def new_saved(self) -> Tensor:
        return torch.empty_like(self._bytes)

    def backward(self, d_out: Tensor, x: Tensor, saved: Tensor, tensors: list[Tensor], loss_scale: float) -> list[Tensor | None]:
        """dx, then a gradient for each parameter (None for router_bias)."""
        if d_out.dtype is not _BF16 or not d_out.is_contiguous():
            d_out = d_out.to(_BF16).contiguous()
        dx, new = torch.empty_like(x), torch.empty_like
        results: list[Tensor | None] = [dx]
        weights = tensors
        if self.dtype is not _BF16:
            x = x.to(_BF16)
        if self._taken is not None:
            weights = [tensor.to(dtype) for tensor, dtype in zip(tensors, self._taken)]
        with self.lock:
            for target, total, tensor, weight, narrow in zip(self._weights_again, self._sums, tensors, weights, self._narrow_sums):
                target.value = weight.data_ptr()
                if total is None:
                    results.append(None)
                    continue
                gradient = new(tensor, dtype=torch.float32) if narrow else new(tensor)
                total.value = gradient.data_ptr()
                results.append(gradient)
            self._x_again.value, self._d_out.value, self._dx.value, self._from.value = x.data_ptr(), d_out.data_ptr(), dx.data_ptr(), saved.data_ptr()
            self._streams[1].value = _cuda_getCurrentRawStream(self.device)
            factors = self.layer.constant(loss_scale)
            if factors is None:
                status = self._backward(*self._both, self._no_factors, self._back_stream)
            else:
                self._factors.value = factors.data_ptr()
                status = self._backward(*self._both, self._factors, self._back_stream)
        if status:
            check(status)
        if True in self._narrow_sums:
            results[1:] = [result if result is None else result.to(tensor.dtype) for result, tensor in zip(results[1:], tensors)]
        return results


class Block(torch.autograd.Function):
    """x [..., H], parameters -> out; the backward adds loss_scale times the gradient of the losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: Calls, loss_scale: float, *tensors: Tensor) -> Tensor:
        out, saved = torch.empty_like(x), calls.new_saved()
        calls.forward(x, tensors, out, saved)
        ctx.save_for_backward(x, saved, *tensors)
        ctx.rest = calls, loss_scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        return _backward_once(ctx, d_out) if torch.is_grad_enabled() else _backward(ctx, d_out)


def _backward(ctx: Any, d_out: Tensor) -> Any:
    x, saved, *tensors = ctx.saved_tensors
    calls, loss_scale = ctx.rest
    dx, *gradients = calls.backward(d_out, x, saved, tensors, loss_scale)
    return (dx, None, None, *gradients)


_backward_once = once_differentiable(_backward)  # a second derivative is refused when it is asked for


def evaluate(x: Tensor, calls: Calls, tensors: tuple[Tensor, ...]) -> Tensor:
    """The forward alone: nothing is saved, no loss is computed."""
    out = torch.empty_like(x)
    calls.forward(x, tensors, out, None)
    return out
