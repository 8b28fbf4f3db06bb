# SPDX-License-Identifier: Apache-2.0
"""Waybill for PyTorch: custom ops with autograd and the MoE block.

All ops have fake functions, so that torch.compile traces through them. On the CPU they run in the calling thread and have finished when they
return. router, grouped_matmul, quantize_mx, dequantize_mx, the MoE block and Exchange's dispatch_slots and combine_slots also take CUDA tensors
where the library was built with CUDA: they queue on the current stream, wait for nothing and can be captured in a CUDA graph.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("waybill.torch needs PyTorch: pip install torch") from error

from ..config import MoeConfig, RouterConfig
from ._exchange import Exchange, Plan
from ._gemm import grouped_matmul
from ._quantize import dequantize_mx, quantize_mx
from ._router import Routes, router
from ._slots import Slots
from .distributed import process_group_fabric
from .hub import from_transformers, load_hub, replace_moe_blocks, to_hub
from .moe import MoE, MoEStats

__all__ = ["Exchange", "MoE", "MoEStats", "MoeConfig", "Plan", "RouterConfig", "Routes", "Slots", "dequantize_mx", "from_transformers", "grouped_matmul",
           "load_hub", "process_group_fabric", "quantize_mx", "replace_moe_blocks", "router", "to_hub"]  # fmt: skip
