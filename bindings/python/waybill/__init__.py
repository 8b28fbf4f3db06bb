# SPDX-License-Identifier: Apache-2.0
"""Waybill: dropless mixture-of-experts training. `waybill.torch` and `waybill.jax` are its ops and MoE block where models already live.

This module needs neither framework: configs, groups of ranks and `update_expert_bias`. It loads libwaybill.so on first use.
"""

from __future__ import annotations

from typing import Any

from ._abi import VERSION as __version__
from ._library import library
from .config import MoeConfig, RouterConfig
from .group import Fabric, Group, single, transport_fabric

__all__ = ["Fabric", "Group", "MoeConfig", "RouterConfig", "__version__", "build_info", "single", "transport_fabric", "update_expert_bias"]


def build_info() -> str:
    """Version, compiler, instruction sets and features of the loaded library, in one line."""
    return library().wb_build_info().decode()


def update_expert_bias(bias: Any, counts: Any, rate: float, *, subtract_mean: bool = False) -> None:
    """bias += rate * sign(mean(counts) - counts), in place: aux-free balancing, once per optimizer step.

    bias [E] float32 on the CPU, counts [E] int64 summed over all ranks (and micro-batches).
    """
    from ._library import check
    from ._tensor import view

    bias_view = view(bias, "bias", dtypes=["float32"], shape=["E"])
    counts_view = view(counts, "counts", dtypes=["int64"], shape=[bias_view.shape[0]])
    check(library().wb_update_expert_bias(bias_view.struct.data, counts_view.struct.data, bias_view.shape[0], rate, subtract_mean))
