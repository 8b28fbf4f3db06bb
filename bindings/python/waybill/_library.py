# SPDX-License-Identifier: Apache-2.0
"""Finds and loads libwaybill.so, checks that it is the one these bindings were written for, and turns statuses into exceptions."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

from . import _abi

_EXCEPTIONS: dict[int, type[Exception]] = {
    _abi.INVALID_ARGUMENT: ValueError,
    _abi.UNSUPPORTED: NotImplementedError,
    _abi.OUT_OF_MEMORY: MemoryError,
    _abi.IO: OSError,
    _abi.TIMEOUT: TimeoutError,
}


class Library(ctypes.CDLL):
    """libwaybill.so."""

    waybill_path: str


def candidates() -> list[pathlib.Path]:
    """Where the library is looked for, in order: $WAYBILL_LIBRARY, the package, then the loader's own path."""
    named = os.environ.get("WAYBILL_LIBRARY")
    if named:
        return [pathlib.Path(named)]
    return [pathlib.Path(__file__).parent / "lib" / "libwaybill.so", pathlib.Path("libwaybill.so")]


def _open() -> tuple[Library, str]:
    tried = []
    for path in candidates():
        if path.is_absolute() and not path.exists():
            tried.append(f"{path}: no such file")
            continue
        try:
            # Global, so that the XLA library finds the same wb_* functions.
            return Library(str(path), mode=ctypes.RTLD_GLOBAL), str(path)
        except OSError as error:
            tried.append(str(error))
    raise ImportError("waybill: libwaybill.so was not found; reinstall the package or set WAYBILL_LIBRARY to its path. Tried: " + "; ".join(tried))


def _check_structs(lib: ctypes.CDLL, path: str) -> None:
    for name, struct in _abi.STRUCTS.items():
        known, ours = lib.wb_struct_size(name.encode()), ctypes.sizeof(struct)
        # A newer library accepts the smaller structs of older headers; the frozen wb_tensor never changes.
        if known < ours or (name == "wb_tensor" and known != ours):
            raise ImportError(f"waybill: {path} has {name} of {known} bytes, these bindings need {ours}; library and Python package must be of one version")


@functools.cache
def library() -> Library:
    """The loaded library with typed functions. Raises ImportError with what was tried."""
    lib, path = _open()
    for name, (result, arguments) in _abi.PROTOTYPES.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise ImportError(f"waybill: {path} lacks {name}; library and Python package must be of one version") from None
        function.restype, function.argtypes = result, arguments
    lib.waybill_path = path
    if lib.wb_check_version(_abi.ABI_VERSION, _abi.VERSION.encode()) != _abi.OK:
        raise ImportError(f"waybill: {path}: {lib.wb_last_error().decode()}")
    _check_structs(lib, path)
    return lib


def torch_library() -> str | None:
    """Where libwaybill_torch.so is: $WAYBILL_TORCH_LIBRARY, the package's, or the one beside libwaybill.so; None where there is none.

    ImportError where the variable names a file that does not exist."""
    named = os.environ.get("WAYBILL_TORCH_LIBRARY")
    if named and not os.path.exists(named):
        raise ImportError(f"waybill: WAYBILL_TORCH_LIBRARY names {named}, which does not exist")
    folders = pathlib.Path(__file__).parent / "lib", pathlib.Path(library().waybill_path).parent
    paths = [named] if named else [str(folder / "libwaybill_torch.so") for folder in folders]
    return next((path for path in paths if os.path.exists(path)), None)


@functools.cache
def has_cuda() -> bool:
    """Whether the library has CUDA kernels. Says nothing about this machine."""
    features = library().wb_build_info().decode().rpartition("features: ")[2].rstrip(")").split()
    return "cuda" in features


def check(status: int) -> None:
    """Raises the exception of a failed call with the library's text.

    ValueError: bad arguments. NotImplementedError: no implementation accepts them. MemoryError, OSError, TimeoutError as they say.
    RuntimeError: everything else (a peer failed, overflow, CUDA, a bug of ours).
    """
    if status == _abi.OK:
        return
    lib = library()
    text = lib.wb_last_error().decode(errors="replace")
    if status not in _EXCEPTIONS:
        text = f"{text} ({lib.wb_status_name(status).decode()})"
    raise _EXCEPTIONS.get(status, RuntimeError)(text)
