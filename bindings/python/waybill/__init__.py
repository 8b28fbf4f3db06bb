# SPDX-License-Identifier: Apache-2.0
"""Waybill: dropless mixture-of-experts training. `waybill.torch` and `waybill.jax` are its ops and MoE block where models already live.

This module needs neither framework: configs, groups of ranks and `update_expert_bias`. It loads libwaybill.so on first use.
"""

from __future__ import annotations

import array
import operator
from typing import Any

from ._abi import VERSION as __version__
from ._library import library
from .config import MoeConfig, RouterConfig
from .group import Fabric, Group, single, transport_fabric

__all__ = ["Fabric", "Group", "MoeConfig", "RouterConfig", "__version__", "build_info", "single", "transport_fabric", "update_expert_bias", "workload"]


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


def workload(name: str, T: int, K: int, E: int, *, P: int = 1, seed: int = 1, step: int = 0) -> tuple[memoryview, list[int]]:
    """Synthetic routes with a named skew ("W0" to "W9" or "balanced", "zipf", ...): what the benchmarks use.

    Returns ids [tokens, K] int32 (a memoryview; numpy and torch take it as it is) and the row bounds [P + 1] of the P sources. tokens is T, but for W9 as many
    as give every expert 1 or 2 rows. ValueError names a wrong name or size, TypeError what is no string or whole number.
    """
    import ctypes

    from ._library import check

    if not isinstance(name, str):
        raise TypeError(f"name must be a string as \"W0\", got {name!r}")
    limits = {"T": (T, 0, 2**31), "K": (K, 1, 2**31), "E": (E, 1, 2**31), "P": (P, 1, 2**31), "seed": (seed, 0, 2**64), "step": (step, 0, 2**63)}
    for what, (value, low, high) in limits.items():
        if not low <= operator.index(value) < high:  # ctypes would cut it off
            raise ValueError(f"{what} = {value} is outside of {low}..{high - 1}")
    tokens = ctypes.c_int64()
    check(library().wb_workload_tokens(name.encode(), T, K, E, ctypes.byref(tokens)))
    if tokens.value * K >= 2**31:  # as the library says; before the memory is asked for
        raise ValueError(f"a workload needs 0 <= T * K < 2^31, got T = {tokens.value}, K = {K}")
    ids, bounds = array.array("i", bytes(4 * tokens.value * K)), array.array("q", bytes(8 * (P + 1)))
    check(library().wb_workload_ids(name.encode(), seed, step, tokens.value, K, E, P, ids.buffer_info()[0], bounds.buffer_info()[0]))
    return (memoryview(ids).cast("B").cast("i", [tokens.value, K]) if len(ids) else memoryview(ids)), list(bounds)
