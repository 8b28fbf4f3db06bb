# SPDX-License-Identifier: Apache-2.0
"""Waybill for PyTorch: custom ops with autograd and the MoE block.

All ops have fake functions, so that torch.compile traces through them. Tensors live on the CPU; CUDA tensors are refused with a clear
error until the library carries its GPU layer. The ops run in the calling thread and have finished when they return.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("waybill.torch needs PyTorch: pip install torch") from error

from ..config import MoeConfig, RouterConfig
from ._exchange import Exchange, Plan
from ._gemm import grouped_matmul
from ._router import Routes, router
from .distributed import process_group_fabric
from .hub import from_transformers, load_hub, replace_moe_blocks, to_hub
from .moe import MoE, MoEStats

__all__ = ["Exchange", "MoE", "MoEStats", "MoeConfig", "Plan", "RouterConfig", "Routes", "from_transformers", "grouped_matmul", "load_hub",
           "process_group_fabric", "replace_moe_blocks", "router", "to_hub"]  # fmt: skip
