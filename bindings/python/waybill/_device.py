# SPDX-License-Identifier: Apache-2.0
"""The MoE layer on GPUs as waybill.torch and waybill.jax share it: one handle for all blocks of a process with the same settings."""

from __future__ import annotations

import contextlib
import ctypes as c
import importlib.util
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import _abi, _core
from ._library import check, library
from .config import MoeConfig


class Peers(NamedTuple):
    """How this process and the others of its group find each other. publish(port of rank 0, or 0) gives rank 0's port to every rank."""

    rank: int
    size: int
    address: str
    publish: Callable[[int], int]


def settings(config: MoeConfig, T: int) -> _abi.MoeConfig:
    """The C struct with T_max: the config's, or the T of this call."""
    struct = config.struct()
    if not struct.T_max:
        struct.T_max = max(T, 1)
    return struct


def saved_bytes(struct: _abi.MoeConfig, P: int) -> int:
    """Bytes that a forward leaves for its backward. NotImplementedError names what the layer on GPUs lacks."""
    size = c.c_int64()
    check(library().wb_device_moe_saved_bytes(c.byref(struct), P, c.byref(size)))
    return size.value


def has_losses(config: MoeConfig) -> bool:
    router = config.router
    return bool(router.aux_coefficient or router.sequence_coefficient or router.z_coefficient or config.global_coefficient)


def loss_indices(config: MoeConfig) -> tuple[int, ...]:
    """Which of the four losses (auxiliary, sequence, global, z) each of the three or six weights of a backward multiplies."""
    if config.global_coefficient and config.router.aux_coefficient:
        return (0, 1, 3, 2, 2, 2)
    return (2, 1, 3) if config.global_coefficient else (0, 1, 3)


def check_environment() -> None:
    """Kernels that are loaded at their first launch wait for the device, and with it for a peer that waits for this launch."""
    if os.environ.get("CUDA_MODULE_LOADING") != "EAGER":
        raise RuntimeError(
            "a group of processes on GPUs needs the environment variable CUDA_MODULE_LOADING=EAGER before CUDA starts; set it where the processes start"
        )
    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    if found is not None and found.submodule_search_locations:  # the one that the frameworks load
        library = os.path.join(next(iter(found.submodule_search_locations)), "lib", "libnccl.so.2")
        if os.path.exists(library):
            os.environ.setdefault("WAYBILL_NCCL_LIBRARY", library)


def check_local_environment() -> None:
    """Where GPUs of one process wait for each other an eager load of kernels goes onto all of them at once, also onto one that waits for this one."""
    if os.environ.get("CUDA_MODULE_LOADING", "LAZY") != "LAZY":
        raise RuntimeError("several GPUs of one process need CUDA_MODULE_LOADING=LAZY (CUDA's default) before CUDA starts, it is "
                           f"{os.environ['CUDA_MODULE_LOADING']}; unset it where the process starts")  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def group_of(peers: Peers | None, device: int) -> Iterator[Any]:
    """The wb_process_group of these peers by reference, None for one process alone. Collective: rank 0 gives out a port."""
    if peers is None or peers.size <= 1:
        yield None
        return
    check_environment()
    port = peers.publish(free_port() if peers.rank == 0 else 0)
    yield c.byref(_abi.ProcessGroup(struct_size=c.sizeof(_abi.ProcessGroup), rank=peers.rank, size=peers.size, device=device, port=port,
                                    address=peers.address.encode()))  # fmt: skip


def num_slots(config: _abi.ExchangeConfig, P: int) -> int:
    """The slot budget with the padding that alignment may add; include/waybill/exchange.h, receive_budget."""
    L, tokens = config.E // P, P * config.T_max
    slots = tokens * min(config.K, L)
    if config.receive_factor > 0:
        slots = min(slots, math.ceil(config.receive_factor * config.T_max * config.K))
    by_slots = slots + (config.alignment - 1) * min(L, slots)
    return min(by_slots // config.alignment * config.alignment, L * (-(-tokens // config.alignment) * config.alignment))


class Layer(_core.Handle):
    """Owner of a wb_device_moe. Creation is collective where there are peers, and waits for the device."""

    _destroy = "wb_device_moe_destroy"

    def __init__(self, struct: _abi.MoeConfig, device: int, peers: Peers | None = None) -> None:
        super().__init__()
        self.P = peers.size if peers is not None else 1
        self.struct, self.device, self.saved_bytes = struct, device, saved_bytes(struct, self.P)
        with group_of(peers, device) as group:
            check(library().wb_device_moe_create(c.byref(struct), device, group, c.byref(self.handle)))

    def __del__(self) -> None:
        if not sys.is_finalizing():  # CUDA and the peers may be gone
            super().__del__()

    def status(self, stream: int) -> _abi.StepStatus:
        """Sticky faults of all calls so far; waits for the stream. RuntimeError where a wait for a peer ran out."""
        status = _abi.StepStatus(struct_size=c.sizeof(_abi.StepStatus))
        check(library().wb_device_moe_get_status(self.handle, c.byref(status), c.byref(_core.cuda_stream(self.device, stream))))
        return status
