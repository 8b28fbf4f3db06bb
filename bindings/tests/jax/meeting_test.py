# SPDX-License-Identifier: Apache-2.0
"""Which calls of different devices meet: those of one execution of one op, whatever the order in which devices come to them."""

import jax
import jax.numpy as jnp
import pytest
import reference
import waybill.jax as wbj
from conftest import assert_trees_close
from jax.sharding import PartitionSpec as P

CONFIG = wbj.MoeConfig(H=8, F=6, router=wbj.RouterConfig(E=8, K=2, aux_coefficient=0.05, z_coefficient=0.01))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def after_work(x, late):
    """x itself, where `late` only after some matrix products."""
    matrix = jnp.full((600, 600), 1 / 600) + 0 * x.sum()
    work = lambda: jax.lax.fori_loop(0, 20, lambda i, value: jnp.tanh(value @ matrix), matrix).max()  # noqa: E731
    return x + jnp.where(jax.lax.cond(late, work, lambda: matrix.max()) > 2.0, 1.0, 0.0)  # never above 2


def two_calls(block, rank):
    """One jitted function called twice on inputs that do not depend on each other; device 0 has the second one ready first, device 1 the first."""
    call = jax.jit(block)

    def both(a, b, params):
        first, loss = call(after_work(a, rank() == 0), params)
        second, other = call(after_work(b, rank() == 1), params)
        return first, second, loss + 3 * other

    return both


@pytest.mark.parametrize("devices", [2, 4])
def test_two_calls_of_one_jitted_function_do_not_mix(devices):
    params = wbj.init_params(jax.random.key(1), CONFIG)
    a, b, d_a, d_b = (normal(seed, 24, 8) for seed in (2, 3, 4, 5))
    mesh = jax.make_mesh((devices,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))

    def ours(x, params):
        out, stats = wbj.moe_block(x, params, CONFIG, axis_name="ep")
        return out, stats.loss

    def local(a, b, params):
        first, second, loss = two_calls(ours, lambda: jax.lax.axis_index("ep"))(a, b, params)
        return first, second, jax.lax.psum(loss, "ep")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("ep"), P("ep"), wbj.param_specs(CONFIG, "ep")), out_specs=(P("ep"), P("ep"), P()))
    plain = two_calls(lambda x, params: reference.block(x, params, CONFIG), lambda: -1)

    def objective(both):
        def function(a, b, params):
            first, second, loss = both(a, b, params)
            return (first * d_a).sum() + (second * d_b).sum() + loss, (first, second)

        return jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True))

    want = objective(plain)(a, b, params)
    step = objective(sharded)
    for _ in range(3):
        assert_trees_close(step(a, b, params), want, 1e-5)
