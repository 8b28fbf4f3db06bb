# SPDX-License-Identifier: Apache-2.0
"""A Flax NNX module over moe_block (that of Flax linen: waybill.jax.flax)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("waybill.jax.nnx needs Flax: pip install flax") from error

from ..config import MoeConfig
from ._block import MoeOutput, init_params, moe_block


class MoE(nnx.Module):
    """The MoE block; parameters gate, w1, w2, ... as config.shapes() says, of all experts. axis_name, padding_mask, training: see moe_block.

    __call__(x [..., H]) -> out [..., H], or (out, MoeOutput) with `with_output=True`: add MoeOutput.loss to the loss. Inside jax.shard_map over axis_name the
    module holds this device's experts: nnx.split it outside, give the state the specs of `state_specs`, nnx.merge inside.
    """

    def __init__(self, config: MoeConfig, *, axis_name: str | None = None, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        self.config, self.axis_name = config, axis_name
        for name, value in init_params(rngs.params(), config, dtype=dtype).items():
            # The bias of the choice has no gradient: update_expert_bias moves it.
            setattr(self, name, nnx.Variable(value) if name == "router_bias" else nnx.Param(value))

    def __call__(self, x: jax.Array, *, padding_mask: jax.Array | None = None, training: bool = True, with_output: bool = False) -> Any:
        params = {name: getattr(self, name)[...] for name in self.config.shapes()}
        out, stats = moe_block(x, params, self.config, axis_name=self.axis_name, padding_mask=padding_mask, training=training)
        return (out, stats) if with_output else out


def state_specs(state: Any, axis_name: str) -> Any:
    """The specs of nnx.split's state of a model: experts (w1, w2, b1, b2 of an MoE) over the axis, everything else on every device."""
    split, replicated = jax.sharding.PartitionSpec(axis_name), jax.sharding.PartitionSpec()

    def spec(path: Any, _: Any) -> Any:
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        return split if any(name in ("w1", "w2", "b1", "b2") for name in names) else replicated

    return jax.tree_util.tree_map_with_path(spec, state)


__all__ = ["MoE", "MoeOutput", "state_specs"]
