# SPDX-License-Identifier: Apache-2.0
"""Checked views of torch tensors, and the table of objects that custom ops name by number or by a token tensor."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .. import _abi, _core, _library
from .._tensor import View, check_shape, describe_shape, make

DTYPES = {torch.float32: _abi.F32, torch.bfloat16: _abi.BF16, torch.float16: _abi.F16, torch.int16: _abi.I16, torch.int32: _abi.I32, torch.int64: _abi.I64,
          torch.uint8: _abi.U8, torch.bool: _abi.U8, torch.float8_e4m3fn: _abi.F8E4M3, torch.float8_e5m2: _abi.F8E5M2}  # fmt: skip

FLOATS = (torch.float32, torch.bfloat16)


@torch.compiler.assume_constant_result
def has_cuda() -> bool:
    """Whether the library has CUDA kernels; a constant for torch.compile, which cannot trace how a library is found."""
    return _library.has_cuda()


def check(tensor: torch.Tensor, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | str | None], *, like: torch.Tensor | None = None,
          on_cuda: bool = False) -> None:  # fmt: skip
    """Device, dtype and shape, with the values in the error. Works on fake tensors too, so that torch.compile refuses at trace time.

    on_cuda: the op has a CUDA form. like: another tensor of the op, on the same device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}, a torch.Tensor is needed")
    if tensor.device.type not in ("cpu", "meta") and not (on_cuda and tensor.device.type == "cuda" and has_cuda()):
        what = "this op" if tensor.device.type == "cuda" and has_cuda() else "this build of Waybill"
        raise NotImplementedError(f"{name} is on {tensor.device}; {what} computes on the CPU only. Move it: .cpu()")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors are on {like.device}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {str(tensor.dtype)[6:]}, allowed are {', '.join(str(dtype)[6:] for dtype in dtypes)}")
    check_shape(tensor.shape, name, shape)


def view(tensor: torch.Tensor, name: str) -> View:
    """A view of a checked tensor; strided tensors are refused."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} {describe_shape(tensor.shape)} is not contiguous (strides {describe_shape(tensor.stride())}); call .contiguous() first")
    return make(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.shape, tensor, tensor.device.index if tensor.is_cuda else None)


def stream(tensor: torch.Tensor) -> _abi.Stream | None:
    """The current stream of the tensor's device; None on the CPU."""
    return _core.cuda_stream(tensor.device.index, torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else None


def optional_view(tensor: torch.Tensor | None, name: str) -> View | None:
    return None if tensor is None else view(tensor, name)


_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(value: Any) -> int:
    """A number for `value`, valid as long as it lives: custom ops take numbers, not objects."""
    number = next(_numbers)
    _objects[number] = value
    return number


def lookup(number: int, what: str) -> Any:
    value = _objects.get(int(number))  # torch.compile may bring a symbol, which this makes a constant of the graph
    if value is None:
        raise RuntimeError(f"the {what} of this call no longer exists; keep it alive until the backward pass has run")
    return value


class _Cell(bytearray):
    """Memory of a token tensor; owns what the token stands for, so that it lives exactly as long as the tensor's storage."""

    __slots__ = ("__weakref__", "give_back", "value")
    value: Any
    give_back: Any

    def __del__(self) -> None:
        if getattr(self, "give_back", None) is not None and self.value is not None:
            self.give_back(self.value)


_cells: weakref.WeakValueDictionary[int, _Cell] = weakref.WeakValueDictionary()


def make_token(value: Any, give_back: Any = None) -> torch.Tensor:
    """An int64 tensor that stands for `value`. A copy of it (a saved-tensor hook, a clone) finds the value only while the original lives."""
    number = next(_numbers)
    cell = _Cell(number.to_bytes(8, "little"))
    cell.value, cell.give_back = value, give_back
    _cells[number] = cell
    return torch.frombuffer(cell, dtype=torch.int64)


def take_token(token: torch.Tensor) -> Any:
    """The value, once; None when it is gone or taken."""
    cell = _cells.get(int(token))
    if cell is None:
        return None
    value, cell.value = cell.value, None
    return value


def peek_token(token: torch.Tensor) -> Any:
    cell = _cells.get(int(token))
    return None if cell is None else cell.value
