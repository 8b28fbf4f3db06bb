# SPDX-License-Identifier: Apache-2.0
"""Overflow of a fixed slot budget: skip the update inside the program, say so on the host now and then."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._block import MoeOutput

_RANK_LOST = 8  # kStatusTimeout


def keep_if_valid(valid: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the step was valid, else `old`, for any pytree: an overflowed step changes neither parameters nor optimizer state."""
    return jax.tree.map(lambda a, b: jnp.where(valid, a, b), new, old)


class OverflowMonitor:
    """Looks at the status every `every_n_steps` steps (0 = never), so that the host does not wait for each; raises after an overflow."""

    def __init__(self, every_n_steps: int = 1) -> None:
        if every_n_steps < 0:
            raise ValueError(f"every_n_steps is {every_n_steps}, it must not be negative (0 = never)")
        self.every_n_steps = every_n_steps
        self._seen: tuple[int, jax.Array] | None = None

    def update(self, step: int, output: MoeOutput) -> None:
        """Call it after each step. RuntimeError names the first overflowed step since the last look, demand, capacity and the fix, or says that a
        rank was lost (GPUs, several nodes)."""
        status = output.status.reshape(-1, 6)
        worst = status[jnp.argmin(status[:, 0])]
        if self._seen is None:
            self._seen = (step, worst)
        else:
            first, kept = self._seen
            self._seen = (first, jnp.where(kept[0] == 0, kept, worst))
        if self.every_n_steps and (step + 1) % self.every_n_steps == 0:
            first, kept = self._seen
            self._seen = None
            valid, demand, capacity, _, _, flags = (int(number) for number in kept)
            if not valid and flags & _RANK_LOST:
                raise RuntimeError(f"steps {first} to {step}: the group has lost a rank, results are worthless; a call that is not replayed names it")
            if not valid:
                raise RuntimeError(
                    f"steps {first} to {step}: the slot budget overflowed (demand {demand}, capacity {capacity}) and updates were skipped; "
                    f"raise receive_factor by {demand / max(capacity, 1):.2f}x, or set it to 0 for the worst case"
                )
