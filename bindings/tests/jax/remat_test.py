# SPDX-License-Identifier: Apache-2.0
"""Rematerialisation with named residuals, their offload to the host, and steps that overflow, all inside jitted training steps."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import waybill.jax as wbj
from conftest import assert_trees_close

CONFIG = wbj.MoeConfig(H=8, F=6, router=wbj.RouterConfig(E=8, K=2, aux_coefficient=0.05, z_coefficient=0.01))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def loss_of(x, params):
    out, stats = wbj.moe_block(x, params, CONFIG)
    return (out * normal(3, 20, 8)).sum() + stats.loss  # linear in out, whose value backward then does not need


def offload(names, kind):
    return jax.checkpoint_policies.save_and_offload_only_these_names(names_which_can_be_saved=[], names_which_can_be_offloaded=names, offload_src="device",
                                                                     offload_dst=kind)  # fmt: skip


def forwards(function, *arguments):
    """Calls of the block's forward in the program, before XLA merges equal ones."""
    return jax.jit(function).lower(*arguments).as_text().count("@waybill_moe_forward(")


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_routes_offloaded_to_the_host_spare_the_forward(kind):
    """The policy moves the routes (as JAX's program says), backward brings them back, and no forward is computed again."""
    x, params = normal(2, 20, 8), wbj.init_params(jax.random.key(1), CONFIG)
    step = jax.value_and_grad(jax.checkpoint(loss_of, policy=offload([wbj.ROUTES], kind)), argnums=(0, 1))
    program = str(jax.make_jaxpr(step)(x, params))
    assert program.count("device_put") > 0
    assert forwards(step, x, params) == 1
    assert_trees_close(jax.jit(step)(x, params), jax.value_and_grad(loss_of, argnums=(0, 1))(x, params), 1e-6)


def test_saving_nothing_runs_the_forward_again():
    x, params = normal(2, 20, 8), wbj.init_params(jax.random.key(1), CONFIG)
    step = jax.value_and_grad(jax.checkpoint(loss_of, policy=jax.checkpoint_policies.nothing_saveable), argnums=(0, 1))
    assert forwards(step, x, params) == 2
    assert_trees_close(jax.jit(step)(x, params), jax.value_and_grad(loss_of, argnums=(0, 1))(x, params), 1e-6)


def test_a_training_step_skips_an_overflow_in_the_program_and_the_monitor_tells_later():
    """Steps 2 and 3 of 8 overflow: neither parameters nor optimizer state move in them; the look at step 3 (every 4) raises, with the numbers."""
    config = dataclasses.replace(CONFIG, mode="captured", receive_factor=2.0)
    tokens = 24
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec

    def local(x, params):
        out, stats = wbj.moe_block(x, params, config, axis_name="ep")
        return out, jax.lax.psum(stats.loss, "ep"), stats.status[None]

    block = jax.shard_map(local, mesh=mesh, in_specs=(P("ep"), wbj.param_specs(config, "ep")), out_specs=(P("ep"), P(), P("ep")))

    @jax.jit
    def step(params, momentum, x):
        def objective(params):
            out, loss, status = block(x, params)
            return jnp.square(out).mean() + loss, status

        gradients, status = jax.grad(objective, has_aux=True)(params)
        new_momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        new_params = jax.tree.map(lambda p, m: p - 0.01 * m, params, new_momentum)
        valid = status[:, 0].min() != 0
        params, momentum = wbj.keep_if_valid(valid, (new_params, new_momentum), (params, momentum))
        return params, momentum, status

    params = wbj.init_params(jax.random.key(1), CONFIG)
    params["gate"] = params["gate"].at[0, 0].set(50.0).at[1, 0].set(40.0)  # rows with a 1 in front all go to the first device
    momentum = jax.tree.map(jnp.zeros_like, params)
    monitor = wbj.OverflowMonitor(every_n_steps=4)
    moved, message = [], ""
    for number in range(8):
        x = normal(number, tokens, 8).at[:, 0].set(1.0 if number in (2, 3) else 0.0)
        new_params, new_momentum, status = step(params, momentum, x)
        moved.append(any(bool((a != b).any()) for a, b in zip(jax.tree.leaves((new_params, new_momentum)), jax.tree.leaves((params, momentum)))))
        params, momentum = new_params, new_momentum
        try:
            monitor.update(number, wbj.MoeOutput(None, None, None, None, None, status))
        except RuntimeError as error:
            message += f"{number}: {error}; "
    assert moved[2:4] == [False, False] and moved[:2] == [True, True] and all(moved[4:])
    assert message.startswith("3: steps 0 to 3: the slot budget overflowed (demand 48, capacity 24)") and message.count("steps") == 1
