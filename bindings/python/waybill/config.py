# SPDX-License-Identifier: Apache-2.0
"""Settings as frozen dataclasses; they are hashable, so that jit and compile treat them as constants.

Letters: T tokens, H model width, E experts, K experts a token, F expert inner width, L local experts, P ranks, R rows, S slots.
Rules are checked by the library, with its text, when a config is used.
"""

from __future__ import annotations

import ctypes as c
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from . import _abi
from ._library import check, library

SCORES = ("softmax", "softmax_selected", "sigmoid", "sqrt_softplus")
GROUP_SCORES = ("top2_sum", "topk_per_group")
MODES = ("eager", "captured")
WIRES = ("float32", "bfloat16")
HIERARCHIES = ("flat", "two_level", "auto")
ACTIVATIONS = ("swiglu", "clamped_swiglu", "relu_squared")
RECIPES = ("fp32", "bf16", "fp8", "mxfp8", "nvfp4")
RECOMPUTES = ("none", "activation", "layer")


def choice(value: str, allowed: tuple[str, ...], name: str) -> int:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, allowed are {', '.join(allowed)}")
    return allowed.index(value)


@dataclass(frozen=True)
class RouterConfig:
    """How a token chooses its experts. E experts, K a token; the other names are those of include/waybill/router.h.

    score: "softmax" (over all E, then top-k), "softmax_selected", "sigmoid" or "sqrt_softplus". renormalise: the K weights sum to
    scaling_factor. num_groups, num_kept_groups: group-limited choice. *_coefficient: of the losses, 0 = off. sequence_length: rows of a
    sequence, needed by sequence_coefficient. normalise_epsilon: added to the sum of a renormalised sigmoid, as some models do; 0 = exact.
    """

    E: int
    K: int
    score: str = "softmax"
    renormalise: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: str = "top2_sum"
    normalise_epsilon: float = 0.0
    forced_balance: bool = False
    aux_coefficient: float = 0.0
    sequence_coefficient: float = 0.0
    z_coefficient: float = 0.0
    sequence_length: int = 0

    def __post_init__(self) -> None:
        # As a constant that graphs of torch.compile and their caches can hold.
        object.__setattr__(self, "text", json.dumps(asdict(self), sort_keys=True))

    def struct(self) -> _abi.RouterConfig:
        """The C struct, defaults of the library included."""
        result = _abi.RouterConfig()
        check(library().wb_router_config_init(c.byref(result), c.sizeof(result)))
        for item in fields(self):
            if item.name not in ("score", "group_score"):
                setattr(result, item.name, getattr(self, item.name))
        result.score = choice(self.score, SCORES, "score")
        result.group_score = choice(self.group_score, GROUP_SCORES, "group_score")
        return result


@dataclass(frozen=True)
class MoeConfig:
    """One MoE layer: gate, router, dispatch, experts, combine. Names as in include/waybill/moe.h.

    H: model width. F: inner width of an expert. latent: 0, or the width that rows are projected to before they travel. shared_F: 0, or the
    inner width of the shared expert. activation: "swiglu", "clamped_swiglu" or "relu_squared". expert_bias: biases on both expert matmuls.
    router_bias: an [E] bias that moves the choice only (no gradient; see
    waybill.update_expert_bias). receive_factor: the slot budget f of captured mode,
    S <= ceil(f * T_max * K); 0 = the mode's default. capacity_factor: 0 = dropless. recompute: what backward computes again. recipe: how operands of
    the expert matmuls are rounded ("fp32" = not); accumulation, weights and gradients stay float32. Recipes with random numbers
    (stochastic_rounding, hadamard; nvfp4 only) take their seed from the caller of the block.
    """

    H: int
    F: int
    router: RouterConfig
    latent: int = 0
    shared_F: int = 0
    activation: str = "swiglu"
    activation_limit: float = field(default=-1.0)  # -1: the library's default
    activation_alpha: float = field(default=-1.0)
    expert_bias: bool = False
    router_bias: bool = False
    global_coefficient: float = 0.0
    mode: str = "eager"
    T_max: int = 0
    receive_factor: float = 0.0
    alignment: int = 1
    combine_wire: str = "float32"
    hierarchy: str = "flat"
    recompute: str = "none"
    recipe: str = "fp32"
    stochastic_rounding: bool | None = None  # None: the library's default
    hadamard: bool | None = None
    capacity_factor: float = 0.0
    pad_to_capacity: bool = False
    allow_dense_map: bool = True
    force_dense_map: bool = False
    overlap_shared: bool = True
    debug_checks: bool = False

    @property
    def inner_width(self) -> int:
        """Columns of the first expert matmul: gate then up (2 F), or F for relu_squared."""
        return self.F if self.activation == "relu_squared" else 2 * self.F

    @property
    def row_width(self) -> int:
        return self.latent or self.H

    def shapes(self, P: int = 1) -> dict[str, tuple[int, ...]]:
        """Shapes of this layer's parameters on one of P ranks, by name."""
        if P < 1 or self.router.E % P:
            raise ValueError(f"E = {self.router.E} experts cannot be spread evenly over {P} ranks")
        E, L, W = self.router.E, self.router.E // P, self.row_width
        result = {"gate": (E, self.H), "w1": (L, self.inner_width, W), "w2": (L, W, self.F)}
        if self.router_bias:
            result["router_bias"] = (E,)
        if self.expert_bias:
            result |= {"b1": (L, self.inner_width), "b2": (L, W)}
        if self.shared_F:
            result |= {"shared_w1": (self.inner_width // self.F * self.shared_F, self.H), "shared_w2": (self.H, self.shared_F)}
        if self.latent:
            result |= {"latent_down": (self.latent, self.H), "latent_up": (self.H, self.latent)}
        return result

    def struct(self) -> _abi.MoeConfig:
        """The C struct, defaults of the library included."""
        result = _abi.MoeConfig()
        check(library().wb_moe_config_init(c.byref(result), c.sizeof(result)))
        result.router = self.router.struct()
        enums: dict[str, tuple[str, ...]] = {"activation": ACTIVATIONS, "mode": MODES, "combine_wire": WIRES, "hierarchy": HIERARCHIES, "recompute": RECOMPUTES,
                                             "recipe": RECIPES}  # fmt: skip
        for item in fields(self):
            value: Any = getattr(self, item.name)
            if item.name in enums:
                setattr(result, item.name, choice(value, enums[item.name], item.name))
            elif item.name in ("activation_limit", "activation_alpha"):
                if value >= 0:
                    setattr(result, item.name, value)
            elif item.name in ("stochastic_rounding", "hadamard"):
                if value is not None:
                    setattr(result, item.name, value)
            elif item.name not in ("router", "router_bias"):
                setattr(result, item.name, value)
        return result
