# SPDX-License-Identifier: Apache-2.0
"""The border: arrays of any framework (DLPack) become wb_tensor views, or a clear error."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import Any

from . import _abi

_CPU_DEVICES = {1, 3, 11, 13}  # kDLCPU; pinned and managed memory of CUDA and ROCm is host memory too
# (DLPack type code, bits) -> wb_dtype
_DTYPES = {(2, 32): _abi.F32, (4, 16): _abi.BF16, (2, 16): _abi.F16, (0, 16): _abi.I16, (0, 32): _abi.I32, (0, 64): _abi.I64, (1, 8): _abi.U8,
           (1, 16): _abi.U16, (2, 64): _abi.F64, (6, 8): _abi.U8, (10, 8): _abi.F8E4M3, (12, 8): _abi.F8E5M2}  # fmt: skip


class _DLTensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32), ("ndim", c.c_int32), ("code", c.c_uint8), ("bits", c.c_uint8),
                ("lanes", c.c_uint16), ("shape", c.POINTER(c.c_int64)), ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64)]  # fmt: skip


_get_pointer = c.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c.c_void_p, [c.py_object, c.c_char_p]


def describe_shape(shape: Sequence[Any]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


class View:
    """A wb_tensor over the memory of `array`; keeps both alive. `struct` is what the library reads."""

    def __init__(self, struct: _abi.Tensor, owner: object) -> None:
        self.struct, self.owner = struct, owner

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.struct.shape[: self.struct.rank])

    @property
    def dtype(self) -> str:
        return _abi.DTYPE_NAMES[self.struct.dtype]


def make(data: int, dtype: int, shape: Sequence[int], owner: object = None, cuda: int | None = None) -> View:
    """A contiguous view of memory that the caller vouches for: the CPU's, or that of CUDA device `cuda`."""
    struct = _abi.Tensor(data=data, dtype=dtype, rank=len(shape))
    if cuda is not None:
        struct.device_type, struct.device_index = 1, cuda
    for axis, size in enumerate(shape):
        struct.shape[axis] = size
    return View(struct, owner)


def view(array: Any, name: str, *, dtypes: Sequence[str], shape: Sequence[int | str | None]) -> View:
    """Checks `array` and views it without a copy.

    dtypes: names that are allowed. shape: a number must match, a letter or None allows any size.
    Errors: TypeError without __dlpack__ or the buffer protocol; ValueError for another dtype, shape or a non-contiguous array; NotImplementedError on a device.
    """
    if not hasattr(array, "__dlpack__"):
        return _view_buffer(array, name, dtypes, shape)
    device = array.__dlpack_device__()
    if int(device[0]) not in _CPU_DEVICES:
        raise NotImplementedError(
            f"{name} is on a device (DLPack device type {int(device[0])}); this build of Waybill computes on the CPU only. Move it: .cpu()"
        )
    try:
        capsule = array.__dlpack__()
    except (BufferError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: {error}") from None
    tensor = c.cast(_get_pointer(capsule, b"dltensor"), c.POINTER(_DLTensor)).contents
    sizes = [tensor.shape[axis] for axis in range(tensor.ndim)]
    dtype = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    dtype_name = _abi.DTYPE_NAMES[dtype] if dtype is not None else f"DLPack type ({tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes)"
    if dtype is None or dtype_name not in dtypes:
        raise ValueError(f"{name} is {dtype_name}, allowed are {', '.join(dtypes)}")
    check_shape(sizes, name, shape)
    if tensor.strides:
        expected = 1
        for axis in reversed(range(tensor.ndim)):
            if sizes[axis] > 1 and tensor.strides[axis] != expected:
                strides = [tensor.strides[i] for i in range(tensor.ndim)]
                raise ValueError(f"{name} {describe_shape(sizes)} is not contiguous (strides {describe_shape(strides)}); make a contiguous copy first")
            expected *= sizes[axis]
    return make((tensor.data or 0) + tensor.byte_offset, dtype, sizes, (array, capsule))


_FORMATS = {"f": _abi.F32, "d": _abi.F64, "e": _abi.F16, "h": _abi.I16, "i": _abi.I32, "l": _abi.I64, "q": _abi.I64, "B": _abi.U8, "?": _abi.U8, "H": _abi.U16}


def _view_buffer(array: Any, name: str, dtypes: Sequence[str], shape: Sequence[int | str | None]) -> View:
    try:
        memory = memoryview(array)
    except TypeError:
        raise TypeError(f"{name}: {type(array).__name__} has neither __dlpack__ nor the buffer protocol; give an array of NumPy, PyTorch or JAX") from None
    dtype = _FORMATS.get(memory.format)
    if dtype is None or _abi.DTYPE_NAMES[dtype] not in dtypes:
        raise ValueError(f"{name} is {_abi.DTYPE_NAMES[dtype] if dtype is not None else repr(memory.format)}, allowed are {', '.join(dtypes)}")
    sizes = memory.shape or ()
    check_shape(sizes, name, shape)
    if not memory.c_contiguous:
        raise ValueError(f"{name} {describe_shape(sizes)} is not contiguous; make a contiguous copy first")
    if memory.readonly:
        raise ValueError(f"{name} is read-only; give a writable buffer")
    return make(c.addressof(c.c_char.from_buffer(memory)) if memory.nbytes else 0, dtype, sizes, memory)


def check_shape(sizes: Sequence[int], name: str, shape: Sequence[int | str | None]) -> None:
    if len(sizes) != len(shape) or any(isinstance(want, int) and want != size for want, size in zip(shape, sizes)):
        raise ValueError(f"{name} has shape {describe_shape(sizes)}, needed is {describe_shape([want if want is not None else '*' for want in shape])}")
