# SPDX-License-Identifier: Apache-2.0
"""One process a rank: a torch.distributed process group as the fabric."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..group import Fabric, transport_fabric


def process_group_fabric(group: dist.ProcessGroup | None = None, *, ranks_per_node: int = 0) -> Fabric:
    """This process's end of a torch.distributed group (None = the default group). Not collective; keep the group alive.

    The group must be able to move CPU tensors (gloo, or "cpu:gloo,cuda:nccl"); its timeout limits every wait. Waybill and other collectives
    of the group must be called in one order on all ranks: give Waybill a group of its own where other threads use it.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group('gloo') first")
    backend = str(dist.get_backend(group))
    if backend in ("nccl", "ucc_cuda", "xccl"):
        raise NotImplementedError(f"backend {backend} cannot move CPU tensors; give a gloo group: torch.distributed.new_group(backend='gloo')")

    def all_to_all(send: memoryview, send_bytes: Sequence[int], receive: memoryview, receive_bytes: Sequence[int]) -> None:
        dist.all_to_all_single(_tensor(receive), _tensor(send), list(receive_bytes), list(send_bytes), group=group)

    return transport_fabric(all_to_all, dist.get_rank(group), dist.get_world_size(group), ranks_per_node=ranks_per_node)


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
