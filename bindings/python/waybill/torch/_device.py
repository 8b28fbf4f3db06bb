# SPDX-License-Identifier: Apache-2.0
"""The MoE block on CUDA tensors: one autograd node in plain eager mode, one custom op each way elsewhere. What a forward leaves for its backward is a tensor."""

from __future__ import annotations

import ctypes as c
import os
from typing import Any, Optional

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.autograd.function import once_differentiable

from .. import _abi, _core, _device
from .._library import check, library
from ..config import MoeConfig
from ..group import Fabric
from . import _views

_ROW_DTYPES = {torch.float32: _abi.F32, torch.bfloat16: _abi.BF16}


class Layer:
    """The handle of the library and the structs of its calls, shared by all blocks of this process with the same settings on this device."""

    def __init__(self, config: MoeConfig, struct: _abi.MoeConfig, device: int, ep: Fabric | None) -> None:
        peers = None
        if ep is not None and ep.size > 1:
            _core._compare_configs(struct, ep)
            peers = _device.Peers(ep.rank, ep.size, os.environ.get("MASTER_ADDR", "127.0.0.1"), ep.all_reduce)
        self.core, self.ep = _device.Layer(struct, device, peers), ep  # kept alive: its id is part of the layer's key
        self.config, self.device, self.P, self.T_max = config, device, self.core.P, struct.T_max
        self.has_losses, self.saved_bytes = _device.has_losses(config), self.core.saved_bytes
        self.number = _views.register(self)
        self.place = torch.device("cuda", device)
        self._indices = torch.tensor(_device.loss_indices(config), device=self.place)
        self._constants = {0.0: torch.zeros(3, device=self.place)}
        lib = library()
        self._forward, self._backward = lib.wb_device_moe_forward, lib.wb_device_moe_backward
        self.parameters, self.gradients = _abi.sized(_abi.MoeTensors), _abi.sized(_abi.MoeTensors)
        self._names: tuple[str, ...] = ()
        self._shapes: tuple[Any, ...] = ()
        self._slots: list[tuple[Any, Any]] = []
        self.x, self.d_out, self.dx = (self._rows(config.H) for _ in range(3))
        self.outputs = _abi.sized(_abi.DeviceMoeOutputs)
        self.outputs.out = self._rows(config.H)
        self.saved = self._array(_abi.U8, self.saved_bytes)
        self.outputs.saved = self.saved
        self.options = _abi.MoeForwardOptions()
        check(lib.wb_moe_forward_options_init(c.byref(self.options), c.sizeof(self.options)))
        self.stream = _core.cuda_stream(device, 0)
        self._fixed = [c.byref(value) for value in (self.parameters, self.gradients, self.x, self.d_out, self.dx, self.options, self.outputs, self.saved,
                                                    self.stream)]  # fmt: skip

    def _array(self, dtype: int, *shape: int) -> _abi.Tensor:
        struct = _abi.Tensor(dtype=dtype, rank=len(shape), device_type=1, device_index=self.device)
        for axis, size in enumerate(shape):
            struct.shape[axis] = size
        return struct

    def _rows(self, H: int) -> _abi.Tensor:
        return self._array(_abi.BF16, 0, H)

    def _name(self, names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> None:
        for structs in (self.parameters, self.gradients):
            for name in _abi.MOE_TENSORS:
                setattr(structs, name, _abi.Tensor())
        for name, tensor in zip(names, tensors):
            setattr(self.parameters, name, self._array(_abi.F32 if name == "router_bias" else _abi.BF16, *tensor.shape))
            if name != "router_bias":
                setattr(self.gradients, name, self._array(_abi.F32, *tensor.shape))
        self._slots = [(getattr(self.parameters, name), getattr(self.gradients, name)) for name in names]
        self._names, self._shapes = names, tuple(tensor.shape for tensor in tensors)

    def _point(self, names: tuple[str, ...], tensors: tuple[Tensor, ...], x: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Fills the structs; the result keeps narrowed copies alive until the call is queued (the allocator orders memory by stream)."""
        if names != self._names or self._shapes != tuple([tensor.shape for tensor in tensors]):
            self._name(names, tensors)
        keep = []
        for (slot, _), name, tensor in zip(self._slots, names, tensors):
            if name != "router_bias" and tensor.dtype is not torch.bfloat16:
                tensor = tensor.to(torch.bfloat16)
                keep.append(tensor)
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
                keep.append(tensor)
            slot.data = tensor.data_ptr()
        self.x.data, self.x.shape[0] = x.data_ptr(), x.shape[0]
        self.options.padding_mask = self._array(_abi.U8, mask.shape[0]) if mask is not None else _abi.Tensor()
        if mask is not None:
            self.options.padding_mask.data = mask.data_ptr()
        self.stream.native = torch._C._cuda_getCurrentRawStream(self.device) or None
        return keep

    def forward(self, x: Tensor, names: tuple[str, ...], tensors: tuple[Tensor, ...], mask: Tensor | None, out_dtype: torch.dtype, training: bool,
                stats: bool) -> tuple[Tensor, ...]:  # fmt: skip
        """x [T, H] bfloat16 -> out, saved and, where stats are wanted, ids, weights, counts, losses, status."""
        T = x.shape[0]
        if T > self.T_max:
            raise ValueError(f"x has {T} rows, this block's T_max is {self.T_max}")
        out = torch.empty(x.shape, dtype=out_dtype, device=self.place)
        saved = torch.empty(self.saved_bytes if training else 0, dtype=torch.uint8, device=self.place)
        keep = self._point(names, tensors, x, mask)
        to = self.outputs
        to.out.data, to.out.dtype, to.out.shape[0] = out.data_ptr(), _ROW_DTYPES[out_dtype], T
        to.saved.data, to.saved.rank = saved.data_ptr(), 1 if training else 0
        self.options.training = training
        results: tuple[Tensor, ...] = ()
        for name in ("ids", "weights", "counts", "losses", "status"):
            getattr(to, name).rank = 0
        if stats:
            router = self.config.router
            ids = torch.empty(T, router.K, dtype=torch.int16 if router.E <= 32768 else torch.int32, device=self.place)
            weights = torch.empty(T, router.K, device=self.place)
            counts, status = (torch.empty(size, dtype=torch.int32, device=self.place) for size in (router.E, 6))
            losses = torch.empty(4, device=self.place)
            results = ids, weights, counts, losses, status
            for name, tensor in zip(("ids", "weights", "counts", "losses", "status"), results):
                setattr(to, name, _views.view(tensor, name).struct)
        parameters, _, rows, _, _, options, outputs, _, stream = self._fixed
        status_code = self._forward(self.core.handle, parameters, rows, options, outputs, stream)
        del keep
        if status_code:
            check(status_code)
        return out, saved, *results

    def backward(self, d_out: Tensor, loss_weights: Tensor | None, x: Tensor, names: tuple[str, ...], tensors: tuple[Tensor, ...], mask: Tensor | None,
                 saved: Tensor, dx_dtype: torch.dtype) -> list[Tensor | None]:  # fmt: skip
        """dx, then a gradient for each parameter in its dtype (None for router_bias)."""
        keep = self._point(names, tensors, x, mask)
        if d_out.dtype is not torch.bfloat16 or not d_out.is_contiguous():
            d_out = d_out.to(torch.bfloat16).contiguous()
        dx = torch.empty(x.shape, dtype=dx_dtype, device=self.place)
        results: list[Tensor | None] = []
        for (_, slot), name, tensor in zip(self._slots, names, tensors):
            if name == "router_bias":
                results.append(None)
                continue
            dtype = torch.float32 if name == "gate" else tensor.dtype
            gradient = torch.empty(tensor.shape, dtype=dtype, device=self.place)
            slot.data, slot.dtype = gradient.data_ptr(), _ROW_DTYPES[dtype]
            results.append(gradient)
        T = x.shape[0]
        self.d_out.data, self.d_out.shape[0] = d_out.data_ptr(), T
        self.dx.data, self.dx.dtype, self.dx.shape[0] = dx.data_ptr(), _ROW_DTYPES[dx_dtype], T
        self.saved.data, self.options.training = saved.data_ptr(), 1
        parameters, gradients, rows, d_outs, dxs, options, _, saved_ref, stream = self._fixed
        factors = loss_weights.data_ptr() if loss_weights is not None else None
        status = self._backward(self.core.handle, parameters, gradients, rows, d_outs, dxs, options, saved_ref, factors, stream)
        del keep
        if status:
            check(status)
        for index, (name, tensor) in enumerate(zip(names, tensors)):
            gradient = results[index]
            if gradient is not None and gradient.dtype is not tensor.dtype:
                results[index] = gradient.to(tensor.dtype)
        return [dx, *results]

    def share(self, mask: Tensor) -> Tensor:
        """[4] float32: what losses over all T rows are multiplied by, so that they are those over the rows that are no padding."""
        T = mask.shape[0]
        tokens = (mask == 0).sum().to(torch.float32)
        one = torch.where(tokens > 0, T / tokens.clamp(min=1), 0.0)
        return torch.stack([one * one, torch.ones_like(one), one * one, one])

    def weights_of(self, d_losses: Tensor) -> Tensor:
        """[4] gradients of the losses -> [3] weights of a backward."""
        return d_losses.to(torch.float32).index_select(0, self._indices)

    def constant(self, scale: float) -> Tensor | None:
        """[3] float32, each `scale`; None stands for 1."""
        if scale == 1.0 or not self.has_losses:
            return None
        found = self._constants.get(scale)
        if found is None:
            found = torch.full((3,), scale, device=self.place)
            if not torch.cuda.is_current_stream_capturing():  # memory of a graph is filled when it is replayed
                self._constants[scale] = found
        return found


_layers: dict[Any, Layer] = {}


def layer_for(config: MoeConfig, T: int, device: int, ep: Fabric | None) -> Layer:
    """The layer of these settings; made where there is none yet, which is collective over ep, waits for the device, and cannot be captured."""
    struct = _device.settings(config, T)
    key = (config, struct.T_max, device, id(ep) if ep is not None and ep.size > 1 else 0)
    layer = _layers.get(key)
    if layer is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"the first call of an MoE block with T_max = {struct.T_max} allocates and cannot be captured; run it once before the capture")
        layer = _layers[key] = Layer(config, struct, device, ep)
    return layer


def _layer(number: int) -> Layer:
    return _views.lookup(number, "MoE layer")


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split(","))


@torch.library.custom_op("waybill::moe_cuda", mutates_args=(), device_types="cuda")
def _moe(x: Tensor, parameters: list[Tensor], padding_mask: Optional[Tensor], names: str, layer: int,
         save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    owner = _layer(layer)
    out, saved, ids, weights, counts, losses, status = owner.forward(x.to(torch.bfloat16).contiguous(), _split(names), tuple(parameters), padding_mask, x.dtype, save,
                                                                     True)  # fmt: skip
    if padding_mask is not None and owner.has_losses:
        losses = losses * owner.share(padding_mask)
    return out, ids, weights, counts, losses, status, saved


@_moe.register_fake
def _(x, parameters, padding_mask, names, layer, save):  # type: ignore[no-untyped-def]
    owner = _layer(layer)
    T, router, new = x.shape[0], owner.config.router, x.new_empty
    return (torch.empty_like(x, memory_format=torch.contiguous_format), new(T, router.K, dtype=torch.int16 if router.E <= 32768 else torch.int32),
            new(T, router.K, dtype=torch.float32), new(router.E, dtype=torch.int32), new(4, dtype=torch.float32), new(6, dtype=torch.int32),
            new(owner.saved_bytes if save else 0, dtype=torch.uint8))  # fmt: skip


@torch.library.custom_op("waybill::moe_cuda_backward", mutates_args=(), device_types="cuda")
def _moe_backward(d_out: Tensor, d_losses: Optional[Tensor], x: Tensor, parameters: list[Tensor], padding_mask: Optional[Tensor], saved: Tensor, names: str,
                  layer: int) -> list[Tensor]:  # fmt: skip
    owner = _layer(layer)
    loss_weights = owner.constant(0.0)
    if d_losses is not None and owner.has_losses:
        loss_weights = owner.weights_of(d_losses if padding_mask is None else d_losses * owner.share(padding_mask))
    results = owner.backward(d_out, loss_weights, x.to(torch.bfloat16).contiguous(), _split(names), tuple(parameters), padding_mask, saved, x.dtype)
    return [result for result in results if result is not None]


@_moe_backward.register_fake
def _(d_out, d_losses, x, parameters, padding_mask, saved, names, layer):  # type: ignore[no-untyped-def]
    given = [tensor for name, tensor in zip(_split(names), parameters) if name != "router_bias"]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, *given)]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, parameters, padding_mask, ctx.names, ctx.layer, ctx.save = inputs
    _, ids, weights, counts, _, status, saved = output
    ctx.mark_non_differentiable(ids, weights, counts, status, saved)
    ctx.has_mask = padding_mask is not None
    ctx.save_for_backward(x, saved, *([padding_mask] if ctx.has_mask else []), *parameters)


def _backward(ctx: Any, d_out: Any, _ids: Any, _weights: Any, _counts: Any, d_losses: Any, *_: Any) -> Any:
    if not ctx.save:
        raise RuntimeError("backward of an MoE block that ran without saving; run its forward with gradients enabled")
    x, saved, *rest = ctx.saved_tensors
    mask = rest.pop(0) if ctx.has_mask else None
    d_out = torch.zeros_like(x) if d_out is None else d_out
    dx, *gradients = torch.ops.waybill.moe_cuda_backward(d_out, d_losses, x, rest, mask, saved, ctx.names, ctx.layer)
    spread = [None if name == "router_bias" else gradients.pop(0) for name in _split(ctx.names)]
    return dx, spread, None, None, None, None


_moe.register_autograd(_backward, setup_context=_setup)


class Block(torch.autograd.Function):
    """x [T, H], parameters -> out [T, H] in plain eager mode; the backward adds loss_scale times the gradient of the losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, names: tuple[str, ...], loss_scale: float, *tensors: Tensor) -> Tensor:
        narrow = x if x.dtype is torch.bfloat16 else x.to(torch.bfloat16)
        out, saved = layer.forward(narrow, names, tensors, None, x.dtype, True, False)
        ctx.save_for_backward(narrow, saved, *tensors)
        ctx.rest = layer, names, loss_scale, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        return _backward_once(ctx, d_out) if torch.is_grad_enabled() else Block._backward(ctx, d_out)

    @staticmethod
    def _backward(ctx: Any, d_out: Tensor) -> Any:
        narrow, saved, *tensors = ctx.saved_tensors
        layer, names, loss_scale, dtype = ctx.rest
        dx, *gradients = layer.backward(d_out, layer.constant(loss_scale), narrow, names, tuple(tensors), None, saved, dtype)
        return (dx, None, None, None, *gradients)


_backward_once = once_differentiable(Block._backward)  # a second derivative is refused when it is asked for


def is_plain(x: Tensor) -> bool:
    """Whether the autograd node may take the call: nothing traces, transforms or wraps it."""
    return (type(x) is Tensor and x.is_contiguous() and x.data_ptr() % 16 == 0 and not torch.compiler.is_compiling() and not _are_functorch_transforms_active()
            and not _len_torch_dispatch_stack())  # fmt: skip


def evaluate(x: Tensor, layer: Layer, names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> Tensor:
    """The forward alone: nothing is saved, no loss is computed."""
    return layer.forward(x.to(torch.bfloat16), names, tensors, None, x.dtype, False, False)[0]
