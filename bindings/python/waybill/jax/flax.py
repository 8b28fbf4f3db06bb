# SPDX-License-Identifier: Apache-2.0
"""A Flax (linen) module over moe_block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import linen as nn
except ImportError as error:
    raise ImportError("waybill.jax.flax needs Flax: pip install flax") from error

from ..config import MoeConfig
from ._block import MoeOutput, moe_block


class MoE(nn.Module):
    """The MoE block; parameters gate, w1, w2, ... as config.shapes(P) says. axis_name, padding_mask, training: see moe_block.

    __call__(x [..., H]) -> out [..., H]. The output of the call's statistics is sown as ("intermediates", "moe"): take MoeOutput.loss from there
    and add it to the loss, or use `with_output=True` to get (out, MoeOutput).
    """

    config: MoeConfig
    axis_name: str | None = None
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, padding_mask: jax.Array | None = None, training: bool = True, with_output: bool = False) -> Any:
        from ._ffi import axis_size

        # Outside of shard_map (init) all experts; inside, this device's.
        P = 1 if self.is_initializing() else axis_size(self.axis_name)
        params = {}
        for name, dims in self.config.shapes(P).items():
            zeros = name in ("b1", "b2", "router_bias")
            # Fan in is the last dimension of every weight here.
            init = nn.initializers.zeros if zeros else nn.initializers.normal(dims[-1] ** -0.5)
            params[name] = self.param(name, init, dims, jnp.float32 if name == "router_bias" else self.dtype)
        axis_name = None if self.is_initializing() else self.axis_name
        out, stats = moe_block(x, params, self.config, axis_name=axis_name, padding_mask=padding_mask, training=training)
        self.sow("intermediates", "moe", stats)
        return (out, stats) if with_output else out


__all__ = ["MoE", "MoeOutput"]
