# SPDX-License-Identifier: Apache-2.0
"""libwaybill_clock.so (bench/peers/clock): the library's functions with a clock around them, so that what a binding adds is told from what they take, in place.

Found at $WAYBILL_CLOCK_LIBRARY or beside libwaybill.so.
"""

import ctypes as c
import os
import pathlib
import sys


def _path():
    named = os.environ.get("WAYBILL_CLOCK_LIBRARY")
    if named:
        return named
    library = pathlib.Path(os.environ.get("WAYBILL_LIBRARY", "libwaybill.so"))
    beside = (library.parent / "libwaybill_clock.so", library.parent.parent.parent / "bench/peers/clock/libwaybill_clock.so")  # packed; of a build
    return str(next((path for path in beside if path.exists()), beside[0]))


class Timed:
    """Loads the clock before libwaybill.so, so that libraries loaded afterwards (waybill.jax's) call through it; make one before anything of Waybill loads."""

    def __init__(self):
        from waybill import _library

        if _library.library.cache_info().currsize:
            sys.exit("timed_library: libwaybill.so is loaded already; the clock must come before it")
        self.lib = c.CDLL(_path(), mode=c.RTLD_GLOBAL)
        self.lib.wbc_open.argtypes, self.lib.wbc_spin.argtypes, self.lib.wbc_spin.restype = [c.c_char_p], [c.c_int64], None
        if not self.lib.wbc_open(_library.library().waybill_path.encode()):
            sys.exit(f"timed_library: {_library.library().waybill_path} was not found by the clock")
        names = ("nanoseconds", "calls", "previous", "last")
        self._nanoseconds, self._calls, self._previous, self._last = (c.c_int64.in_dll(self.lib, f"wbc_{name}") for name in names)
        self._skip = c.c_int32.in_dll(self.lib, "wbc_skip")

    @property
    def nanoseconds(self):
        return self._nanoseconds.value

    @property
    def calls(self):
        return self._calls.value

    @property
    def step(self):
        """Nanoseconds of the two last calls: of a step forward and backward."""
        return self._previous.value, self._last.value

    def skip(self, does):
        """Whether the library's functions do nothing from now on (results are then not written)."""
        self._skip.value = int(does)

    def spin(self, nanoseconds):
        """Keeps this thread's core busy, without Python's lock."""
        self.lib.wbc_spin(nanoseconds)

    def functions(self):
        """For waybill.torch._plain.library: the block's two functions by their names."""
        return self.lib
