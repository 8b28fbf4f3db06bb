# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: ranks as threads of this process, or over a transport of the caller (a framework's process group)."""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Callable, Sequence
from typing import Any

from . import _abi
from ._library import check, library

# all_to_all(send, send_bytes, receive, receive_bytes): moves send_bytes[p] bytes of the buffer `send` to each rank p, in rank order, and
# fills `receive` likewise. Blocks. Raises where it cannot.
Transport = Callable[[memoryview, Sequence[int], memoryview, Sequence[int]], None]


class Fabric:
    """One rank of a group; used by one thread at a time. Collective calls are made by every rank in one order."""

    def __init__(self, handle: int, rank: int, size: int, owner: object, destroy: bool = False) -> None:
        self.handle, self.rank, self.size = handle, rank, size
        self._owner, self._destroy = owner, destroy

    def __del__(self) -> None:
        if self._destroy and self.handle:
            library().wb_fabric_destroy(self.handle)
            self.handle = 0

    def barrier(self) -> None:
        check(library().wb_fabric_barrier(self.handle))

    def abort(self, reason: str) -> None:
        """Wakes every rank that waits for this one: their calls raise RuntimeError with `reason`. Call it when this rank gives up."""
        check(library().wb_fabric_abort(self.handle, reason.encode()))

    def all_reduce(self, value: int) -> int:
        """Sum of an integer over the ranks."""
        number = c.c_int64(value)
        check(library().wb_fabric_all_reduce_i64(self.handle, c.byref(number), 1))
        return number.value


class Group:
    """P ranks as threads of this process.

    timeout: longest wait for a peer in seconds. ranks_per_node: plays nodes of that many ranks (0 = one node), which the two-level exchange
    respects. Each rank's calls are made from a thread of its own; `run` starts them.
    """

    def __init__(self, P: int, *, timeout: float = 60.0, ranks_per_node: int = 0) -> None:
        handle = c.c_void_p()
        check(library().wb_group_create(P, int(timeout * 1000), ranks_per_node, c.byref(handle)))
        self.P, self._handle = P, handle

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            library().wb_group_destroy(self._handle)
            self._handle = c.c_void_p()

    def fabric(self, rank: int) -> Fabric:
        handle = c.c_void_p()
        check(library().wb_group_fabric(self._handle, rank, c.byref(handle)))
        return Fabric(handle.value or 0, rank, self.P, self)

    def run(self, body: Callable[[Fabric], Any]) -> list[Any]:
        """Calls body(fabric) on P threads and returns their results in rank order. The first error wakes the other ranks and is raised here."""
        results: list[Any] = [None] * self.P
        errors: list[tuple[int, BaseException]] = []

        def one(rank: int) -> None:
            fabric = self.fabric(rank)
            try:
                results[rank] = body(fabric)
            except BaseException as error:  # noqa: BLE001 - handed to the caller's thread below
                errors.append((rank, error))
                fabric.abort(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=one, args=(rank,), name=f"waybill-rank-{rank}") for rank in range(self.P)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0][1]
        return results


def single() -> Fabric:
    """The group of one rank, for layers that are not distributed. A new one at every call: a fabric serves one thread at a time."""
    return Group(1).fabric(0)


def transport_fabric(all_to_all: Transport, rank: int, size: int, *, ranks_per_node: int = 0) -> Fabric:
    """One rank of a group over the caller's own all-to-all (see Transport). An exception of it fails the group with its text."""

    def call(_user: Any, send: Any, send_bytes: Any, receive: Any, receive_bytes: Any, error: Any, error_bytes: int) -> int:
        try:
            out, into = send_bytes[:size], receive_bytes[:size]
            all_to_all(_memory(send, sum(out)), out, _memory(receive, sum(into)), into)
            return 0
        except BaseException as problem:  # noqa: BLE001 - no exception may cross into C
            text = f"{type(problem).__name__}: {problem}".encode()[: error_bytes - 1] + b"\0"
            c.memmove(error, text, len(text))
            return 1

    callback = _abi.AllToAll(call)
    transport = _abi.FabricTransport(struct_size=c.sizeof(_abi.FabricTransport), user=None, all_to_all=callback)
    handle = c.c_void_p()
    check(library().wb_fabric_create(c.byref(transport), size, rank, ranks_per_node, c.byref(handle)))
    return Fabric(handle.value or 0, rank, size, (callback, transport), destroy=True)


def _memory(address: int | None, size: int) -> memoryview:
    return memoryview((c.c_char * size).from_address(address) if size and address else bytearray(0)).cast("B")
