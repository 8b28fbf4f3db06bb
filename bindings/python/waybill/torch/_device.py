# SPDX-License-Identifier: Apache-2.0
"""The MoE block on CUDA tensors: one custom op each way. What a forward leaves for its backward is a tensor. Plain eager mode is in _plain.py."""

from __future__ import annotations

import ctypes as c
import os
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _abi, _core, _device
from .._library import check, library
from ..config import MoeConfig
from ..group import Fabric
from . import _views

ROW_DTYPES = {torch.float32: _abi.F32, torch.bfloat16: _abi.BF16}
_SINGLE = ("router_bias", "b1", "b2")  # those that the layer takes, and gives gradients of, in float32


def dtype_in(name: str) -> torch.dtype:
    """What the layer takes this parameter in."""
    return torch.float32 if name in _SINGLE else torch.bfloat16


def gradient_dtype(name: str, tensor: Tensor) -> torch.dtype:
    """What the layer writes this parameter's gradient in."""
    return torch.float32 if name in _SINGLE else tensor.dtype


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
        self._constants = {0.0: torch.zeros_like(self._indices, dtype=torch.float32)}
        self.bytes = torch.empty(1, dtype=torch.uint8, device=self.place).expand(self.saved_bytes)  # empty_like() of it is the fastest allocation
        lib = library()
        self.forward_function, self.backward_function = lib.wb_device_moe_forward, lib.wb_device_moe_backward
        self.parameters, self.gradients = _abi.sized(_abi.MoeTensors), _abi.sized(_abi.MoeTensors)
        self._names: tuple[str, ...] = ()
        self._shapes: tuple[Any, ...] = ()
        self._slots: list[tuple[Any, Any]] = []
        self.x, self.d_out, self.dx = (self._rows(config.H) for _ in range(3))
        self.outputs = _abi.sized(_abi.DeviceMoeOutputs)
        self.outputs.out = self._rows(config.H)
        self.saved = self.array(_abi.U8, self.saved_bytes)
        self.outputs.saved = self.saved
        self.options, self.stream = self.new_options(1), self.new_stream()
        self._fixed = [c.byref(value) for value in (self.parameters, self.gradients, self.x, self.d_out, self.dx, self.options, self.outputs, self.saved,
                                                    self.stream)]  # fmt: skip

    def check_rows(self, T: int) -> None:
        if T > self.T_max:
            raise ValueError(f"x has {T} rows, this block's T_max is {self.T_max}")

    def new_options(self, training: int) -> _abi.MoeForwardOptions:
        options = _abi.MoeForwardOptions()
        check(library().wb_moe_forward_options_init(c.byref(options), c.sizeof(options)))
        options.training = training
        return options

    def new_stream(self) -> _abi.Stream:
        return _core.cuda_stream(self.device, 0)

    def array(self, dtype: int, *shape: int) -> _abi.Tensor:
        struct = _abi.Tensor(dtype=dtype, rank=len(shape), device_type=1, device_index=self.device)
        for axis, size in enumerate(shape):
            struct.shape[axis] = size
        return struct

    def _rows(self, H: int) -> _abi.Tensor:
        return self.array(_abi.BF16, 0, H)

    def _name(self, names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> None:
        for structs in (self.parameters, self.gradients):
            for name in _abi.MOE_TENSORS:
                setattr(structs, name, _abi.Tensor())
        for name, tensor in zip(names, tensors):
            setattr(self.parameters, name, self.array(ROW_DTYPES[dtype_in(name)], *tensor.shape))
            if name != "router_bias":
                setattr(self.gradients, name, self.array(_abi.F32, *tensor.shape))
        self._slots = [(getattr(self.parameters, name), getattr(self.gradients, name)) for name in names]
        self._names, self._shapes = names, tuple(tensor.shape for tensor in tensors)

    def _point(self, names: tuple[str, ...], tensors: tuple[Tensor, ...], x: Tensor, mask: Tensor | None, seed: Tensor | None) -> list[Tensor]:
        """Fills the structs; the result keeps narrowed copies alive until the call is queued (the allocator orders memory by stream)."""
        if names != self._names or self._shapes != tuple([tensor.shape for tensor in tensors]):
            self._name(names, tensors)
        keep = []
        for (slot, _), name, tensor in zip(self._slots, names, tensors):
            if tensor.dtype is not dtype_in(name):
                tensor = tensor.to(dtype_in(name))
                keep.append(tensor)
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
                keep.append(tensor)
            slot.data = tensor.data_ptr()
        self.x.data, self.x.shape[0] = x.data_ptr(), x.shape[0]
        self.options.padding_mask = self.array(_abi.U8, mask.shape[0]) if mask is not None else _abi.Tensor()
        if mask is not None:
            self.options.padding_mask.data = mask.data_ptr()
        self.options.rounding_seed_device = None if seed is None else seed.data_ptr()
        self.stream.native = torch._C._cuda_getCurrentRawStream(self.device) or None
        return keep

    def forward(self, x: Tensor, names: tuple[str, ...], tensors: tuple[Tensor, ...], mask: Tensor | None, seed: Tensor | None, out_dtype: torch.dtype,
                training: bool) -> tuple[Tensor, ...]:  # fmt: skip
        """x [T, H] bfloat16 -> out, saved, ids, weights, counts, losses, status. seed: int64 scalar on the device."""
        T = x.shape[0]
        self.check_rows(T)
        out = torch.empty(x.shape, dtype=out_dtype, device=self.place)
        saved = torch.empty(self.saved_bytes if training else 0, dtype=torch.uint8, device=self.place)
        keep = self._point(names, tensors, x, mask, seed)
        to = self.outputs
        to.out.data, to.out.dtype, to.out.shape[0] = out.data_ptr(), ROW_DTYPES[out_dtype], T
        to.saved.data, to.saved.rank = saved.data_ptr(), 1 if training else 0
        self.options.training = training
        router = self.config.router
        ids = torch.empty(T, router.K, dtype=torch.int16 if router.E <= 32768 else torch.int32, device=self.place)
        weights = torch.empty(T, router.K, device=self.place)
        counts, status = (torch.empty(size, dtype=torch.int32, device=self.place) for size in (router.E, 6))
        losses = torch.empty(4, device=self.place)
        results = ids, weights, counts, losses, status
        for name, tensor in zip(("ids", "weights", "counts", "losses", "status"), results):
            setattr(to, name, _views.view(tensor, name).struct)
        parameters, _, rows, _, _, options, outputs, _, stream = self._fixed
        status_code = self.forward_function(self.core.handle, parameters, rows, options, outputs, stream)
        del keep
        if status_code:
            check(status_code)
        return out, saved, *results

    def backward(self, d_out: Tensor, loss_weights: Tensor | None, x: Tensor, names: tuple[str, ...], tensors: tuple[Tensor, ...], mask: Tensor | None,
                 seed: Tensor | None, saved: Tensor, dx_dtype: torch.dtype) -> list[Tensor | None]:  # fmt: skip
        """dx, then a gradient for each parameter in its dtype (None for router_bias)."""
        keep = self._point(names, tensors, x, mask, seed)
        if d_out.dtype is not torch.bfloat16 or not d_out.is_contiguous():
            d_out = d_out.to(torch.bfloat16).contiguous()
        dx = torch.empty(x.shape, dtype=dx_dtype, device=self.place)
        results: list[Tensor | None] = []
        for (_, slot), name, tensor in zip(self._slots, names, tensors):
            if name == "router_bias":
                results.append(None)
                continue
            dtype = gradient_dtype(name, tensor)
            gradient = torch.empty(tensor.shape, dtype=dtype, device=self.place)
            slot.data, slot.dtype = gradient.data_ptr(), ROW_DTYPES[dtype]
            results.append(gradient)
        T = x.shape[0]
        self.d_out.data, self.d_out.shape[0] = d_out.data_ptr(), T
        self.dx.data, self.dx.dtype, self.dx.shape[0] = dx.data_ptr(), ROW_DTYPES[dx_dtype], T
        self.saved.data, self.options.training = saved.data_ptr(), 1
        parameters, gradients, rows, d_outs, dxs, options, _, saved_ref, stream = self._fixed
        factors = loss_weights.data_ptr() if loss_weights is not None else None
        status = self.backward_function(self.core.handle, parameters, gradients, rows, d_outs, dxs, options, saved_ref, factors, stream)
        del keep
        if status:
            check(status)
        return [dx, *(total.to(tensor.dtype) if total is not None else None for total, tensor in zip(results, tensors))]

    def share(self, mask: Tensor) -> Tensor:
        """[4] float32: what losses over all T rows are multiplied by, so that they are those over the rows that are no padding."""
        T = mask.shape[0]
        tokens = (mask == 0).sum().to(torch.float32)
        one = torch.where(tokens > 0, T / tokens.clamp(min=1), 0.0)
        return torch.stack([one * one, torch.ones_like(one), one * one, one])

    def weights_of(self, d_losses: Tensor) -> Tensor:
        """[4] gradients of the losses -> [3] or [6] weights of a backward."""
        return d_losses.to(torch.float32).index_select(0, self._indices)

    def constant(self, scale: float) -> Tensor | None:
        """[3] or [6] float32, each `scale`; None stands for 1."""
        if scale == 1.0 or not self.has_losses:
            return None
        found = self._constants.get(scale)
        if found is None:
            found = torch.full_like(self._constants[0.0], scale)
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
def _moe(x: Tensor, parameters: list[Tensor], padding_mask: Optional[Tensor], seed: Optional[Tensor], names: str, layer: int,
         save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    owner = _layer(layer)
    narrow = x.to(torch.bfloat16).contiguous()
    out, saved, ids, weights, counts, losses, status = owner.forward(narrow, _split(names), tuple(parameters), padding_mask, seed, x.dtype, save)
    if padding_mask is not None and owner.has_losses:
        losses = losses * owner.share(padding_mask)
    return out, ids, weights, counts, losses, status, saved


@_moe.register_fake
def _(x, parameters, padding_mask, seed, names, layer, save):  # type: ignore[no-untyped-def]
    owner = _layer(layer)
    T, router, new = x.shape[0], owner.config.router, x.new_empty
    return (torch.empty_like(x, memory_format=torch.contiguous_format), new(T, router.K, dtype=torch.int16 if router.E <= 32768 else torch.int32),
            new(T, router.K, dtype=torch.float32), new(router.E, dtype=torch.int32), new(4, dtype=torch.float32), new(6, dtype=torch.int32),
            new(owner.saved_bytes if save else 0, dtype=torch.uint8))  # fmt: skip


@torch.library.custom_op("waybill::moe_cuda_backward", mutates_args=(), device_types="cuda")
def _moe_backward(d_out: Tensor, d_losses: Optional[Tensor], x: Tensor, parameters: list[Tensor], padding_mask: Optional[Tensor], seed: Optional[Tensor],
                  saved: Tensor, names: str, layer: int) -> list[Tensor]:  # fmt: skip
    owner = _layer(layer)
    loss_weights = owner.constant(0.0)
    if d_losses is not None and owner.has_losses:
        loss_weights = owner.weights_of(d_losses if padding_mask is None else d_losses * owner.share(padding_mask))
    results = owner.backward(d_out, loss_weights, x.to(torch.bfloat16).contiguous(), _split(names), tuple(parameters), padding_mask, seed, saved, x.dtype)
    return [result for result in results if result is not None]


@_moe_backward.register_fake
def _(d_out, d_losses, x, parameters, padding_mask, seed, saved, names, layer):  # type: ignore[no-untyped-def]
    given = [tensor for name, tensor in zip(_split(names), parameters) if name != "router_bias"]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, *given)]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, parameters, padding_mask, seed, ctx.names, ctx.layer, ctx.save = inputs
    _, ids, weights, counts, _, status, saved = output
    ctx.mark_non_differentiable(ids, weights, counts, status, saved)
    ctx.has_mask, ctx.has_seed = padding_mask is not None, seed is not None
    ctx.save_for_backward(x, saved, *(tensor for tensor in (padding_mask, seed) if tensor is not None), *parameters)


def _backward(ctx: Any, d_out: Any, _ids: Any, _weights: Any, _counts: Any, d_losses: Any, *_: Any) -> Any:
    if not ctx.save:
        raise RuntimeError("backward of an MoE block that ran without saving; run its forward with gradients enabled")
    x, saved, *rest = ctx.saved_tensors
    mask = rest.pop(0) if ctx.has_mask else None
    seed = rest.pop(0) if ctx.has_seed else None
    d_out = torch.zeros_like(x) if d_out is None else d_out
    dx, *gradients = torch.ops.waybill.moe_cuda_backward(d_out, d_losses, x, rest, mask, seed, saved, ctx.names, ctx.layer)
    spread = [None if name == "router_bias" else gradients.pop(0) for name in _split(ctx.names)]
    return dx, spread, None, None, None, None, None


_moe.register_autograd(_backward, setup_context=_setup)


class Eager(torch.autograd.Function):
    """The custom op's work in eager mode, where its dispatch costs a multiple of it: x, a layer, names, mask, seed, a loss scale, parameters -> out, ids,
    weights, counts, losses, status. loss_scale: what the backward adds the gradient of the losses with; None: with what comes for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Layer, names: tuple[str, ...], mask: Tensor | None, seed: Tensor | None, loss_scale: float | None,
                *tensors: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
        out, saved, ids, weights, counts, losses, status = owner.forward(x.to(torch.bfloat16).contiguous(), names, tensors, mask, seed, x.dtype, True)
        if mask is not None and owner.has_losses:
            losses = losses * owner.share(mask)
        ctx.mark_non_differentiable(ids, weights, counts, status)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, saved, mask, seed, *tensors)
        ctx.rest = owner, names, loss_scale
        return out, ids, weights, counts, losses, status

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, _ids: Any, _weights: Any, _counts: Any, d_losses: Tensor | None, _status: Any) -> Any:
        owner, names, loss_scale = ctx.rest
        x, saved, mask, seed, *tensors = ctx.saved_tensors
        if loss_scale is not None and owner.has_losses:
            d_losses = torch.full((4,), loss_scale, device=x.device)
        loss_weights = owner.constant(0.0)
        if d_losses is not None and owner.has_losses:
            loss_weights = owner.weights_of(d_losses if mask is None else d_losses * owner.share(mask))
        d_out = torch.zeros_like(x) if d_out is None else d_out
        dx, *gradients = owner.backward(d_out, loss_weights, x.to(torch.bfloat16).contiguous(), names, tuple(tensors), mask, seed, saved, x.dtype)
        return dx, None, None, None, None, None, *gradients
