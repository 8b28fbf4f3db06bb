# SPDX-License-Identifier: Apache-2.0
"""moe_block under the recipes of blocks on a GPU: against the same block on the CPU with the same recipe, and against no rounding at all."""

import dataclasses

import numpy as np
import pytest
from conftest import RECIPES, SEED, jax_gpus, needs_jax_gpu, norm_error

jax = pytest.importorskip("jax")
jnp = jax.numpy
wbj = pytest.importorskip("waybill.jax")

pytestmark = needs_jax_gpu()
CONFIG = wbj.MoeConfig(H=128, F=96, router=wbj.RouterConfig(E=8, K=2), recipe="bf16")


def run(config, platform, dtype, seed=SEED):
    device = jax_gpus()[0] if platform == "cuda" else jax.devices("cpu")[0]
    random = np.random.default_rng(20261201).standard_normal

    def new(scale, *shape):
        return jax.device_put(jnp.asarray(random(shape) * scale).astype(jnp.bfloat16).astype(dtype), device)

    params = {name: new(shape[-1] ** -0.5, *shape) for name, shape in config.shapes().items()}
    x, d_out = new(1.0, 200, config.H), new(1.0, 200, config.H)

    def objective(x, params, seed):
        out = wbj.moe_block(x, params, config, platform=platform, rounding_seed=seed)[0]
        return (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(), out

    compiled = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
    runs = [jax.tree.map(np.asarray, compiled(x, params, jax.device_put(np.uint32(seed), device))) for _ in range(2)]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*map(jax.tree.leaves, runs), strict=True))
    (_, out), (dx, gradients) = runs[0]
    return {name: np.asarray(value, np.float64) for name, value in {"out": out, "dx": dx, **gradients}.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_that_of_the_cpu(recipe):
    bound, config = RECIPES[recipe], dataclasses.replace(CONFIG, recipe=recipe)
    got, same = run(config, "cuda", jnp.bfloat16), run(config, "cpu", jnp.float32)
    exact = run(dataclasses.replace(CONFIG, recipe="fp32"), "cpu", jnp.float32)
    for name, value in got.items():
        near, far = norm_error(value, same[name]), norm_error(value, exact[name])
        assert near <= bound.near and far <= bound.far and (far >= bound.least or name == "gate"), (name, near, far)
    other = run(config, "cuda", jnp.bfloat16, SEED + 1)
    assert (other["out"] == got["out"]).all() and (other["dx"] == got["dx"]).all() == (recipe != "nvfp4")
