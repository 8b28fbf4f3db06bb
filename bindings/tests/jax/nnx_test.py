# SPDX-License-Identifier: Apache-2.0
"""The Flax NNX module: moe_block's values and gradients, a training step, and its experts over a mesh axis."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import waybill.jax as wbj
from conftest import assert_trees_close
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax", reason="flax is not installed")
from flax import nnx  # noqa: E402
from waybill.jax.nnx import MoE, state_specs  # noqa: E402

CONFIG = wbj.MoeConfig(H=16, F=24, router=wbj.RouterConfig(E=8, K=2, aux_coefficient=0.01, z_coefficient=1e-3), shared_F=8)


def params_of(module):
    return {name: getattr(module, name)[...] for name in module.config.shapes()}


def loss_of(module, x):
    out, moe = module(x, with_output=True)
    return jnp.square(out).sum() + moe.loss


def test_the_module_is_the_block():
    module, x = MoE(CONFIG, rngs=nnx.Rngs(1)), jax.random.normal(jax.random.key(2), (3, 5, 16))
    params = params_of(module)
    assert {name: value.shape for name, value in params.items()} == CONFIG.shapes()

    def plain(params):
        out, moe = wbj.moe_block(x, params, CONFIG)
        return jnp.square(out).sum() + moe.loss

    value, gradients = nnx.jit(nnx.value_and_grad(loss_of))(module, x)
    want, expected = jax.jit(jax.value_and_grad(plain))(params)
    assert value == want
    assert_trees_close({name: gradients[name][...] for name in expected}, expected, 1e-6)


def test_it_trains_and_the_bias_of_the_choice_is_no_parameter():
    config = dataclasses.replace(CONFIG, router_bias=True)
    module, x = MoE(config, rngs=nnx.Rngs(1)), jax.random.normal(jax.random.key(2), (40, 16))
    target = jnp.roll(x, 1, axis=-1)

    @nnx.jit
    def step(module):
        def objective(module):
            out, moe = module(x, with_output=True)
            return jnp.square(out - target).mean() + moe.loss

        loss, gradients = nnx.value_and_grad(objective)(module)
        state = nnx.state(module, nnx.Param)
        nnx.update(module, jax.tree.map(lambda p, g: p - 0.5 * g, state, gradients))
        return loss

    losses = [float(step(module)) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    assert "router_bias" not in nnx.state(module, nnx.Param) and jnp.abs(module.router_bias[...]).max() == 0


def test_experts_over_an_axis_give_the_gradients_of_one_device():
    whole, x = MoE(CONFIG, rngs=nnx.Rngs(1)), jax.random.normal(jax.random.key(2), (24, 16))
    expected = nnx.grad(loss_of)(whole, x)
    spread = MoE(CONFIG, axis_name="ep", rngs=nnx.Rngs(1))
    graph, state = nnx.split(spread)
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(state, x):
        return jax.lax.psum(loss_of(nnx.merge(graph, state), x), "ep")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(state_specs(state, "ep"), P("ep")), out_specs=P())
    gradients = jax.jit(jax.grad(sharded))(state, x)
    for name in CONFIG.shapes():
        assert_trees_close(gradients[name][...], expected[name][...], 1e-5)
