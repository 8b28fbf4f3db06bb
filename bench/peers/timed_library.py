# SPDX-License-Identifier: Apache-2.0
"""The block's two C functions with a clock around them (bindings/torch/timed_calls.cc): what a binding adds is told from what they take, in place."""

import ctypes as c

from waybill import _library


def in_jax():
    """Puts them behind waybill.jax's ops on GPUs; nanoseconds in them so far."""
    from waybill.jax import _ffi

    timed, nanoseconds = functions()
    for name in ("forward", "backward"):
        c.c_void_p.in_dll(_ffi.load(), f"wbx_{name}").value = c.cast(timed[f"wb_device_moe_{name}"], c.c_void_p).value
    return nanoseconds


def functions():
    """({name: function}, nanoseconds in them so far, a c_int64). ImportError without libwaybill_torch.so."""
    path = _library.torch_library()
    if path is None:
        raise ImportError("the clock around the library's functions is in libwaybill_torch.so: none was found (WAYBILL_TORCH_LIBRARY)")
    lib, ours = c.CDLL(path), _library.library()
    for name in ("forward", "backward"):
        c.c_void_p.in_dll(lib, f"wbt_{name}").value = c.cast(ours[f"wb_device_moe_{name}"], c.c_void_p).value
    return {f"wb_device_moe_{name}": lib[f"wbt_timed_{name}"] for name in ("forward", "backward")}, c.c_int64.in_dll(lib, "wbt_nanoseconds")
