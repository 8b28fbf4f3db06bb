# SPDX-License-Identifier: Apache-2.0
"""Waybill for JAX: XLA FFI ops with custom VJPs, and the MoE block.

All ops work under jit, grad, remat and vmap; those with `axis_name` inside jax.shard_map over devices of one process, or of several
(jax.distributed). They run on the CPU, and on CUDA devices where the library was built with CUDA: on XLA's stream, without a wait, in command buffers too
(all but the start/done pairs).
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("waybill.jax needs JAX: pip install jax") from error

from ..config import MoeConfig, RouterConfig
from ._device_block import SAVED
from ._block import ROUTES, MoeOutput, init_params, moe_block, param_specs
from ._exchange import Slots, combine, dispatch, permute, unpermute
from ._gemm import grouped_matmul, ragged_dot
from ._overlap import Pending, combine_done, combine_start, dispatch_done, dispatch_start, overlap
from ._overflow import OverflowMonitor, keep_if_valid
from ._quantize import dequantize_mx, quantize_mx
from ._router import Routes, router

__all__ = ["ROUTES", "SAVED", "MoeConfig", "MoeOutput", "OverflowMonitor", "Pending", "RouterConfig", "Routes", "Slots", "combine", "combine_done",
           "combine_start", "dequantize_mx", "dispatch", "dispatch_done", "dispatch_start", "grouped_matmul", "init_params", "keep_if_valid", "moe_block",
           "overlap", "param_specs", "permute", "quantize_mx", "ragged_dot", "router", "unpermute"]  # fmt: skip
