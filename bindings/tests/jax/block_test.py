# SPDX-License-Identifier: Apache-2.0
"""moe_block against the plain JAX block: values, gradients, jit, vmap, remat, scan, shard_map, overflow, refusals."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
import reference
import waybill.jax as wbj
from conftest import assert_trees_close, relative
from jax.sharding import PartitionSpec as P
from waybill.jax import _ffi

LOSSES = {"aux_coefficient": 0.05, "z_coefficient": 0.01}
CONFIG = wbj.MoeConfig(H=8, F=6, router=wbj.RouterConfig(E=8, K=2, **LOSSES))
CONFIGS = {
    "plain": CONFIG,
    "shared": dataclasses.replace(CONFIG, shared_F=5),
    "sigmoid_bias": wbj.MoeConfig(H=8, F=6, router=wbj.RouterConfig(E=8, K=3, score="sigmoid", scaling_factor=2.5, z_coefficient=0.01), router_bias=True),
    "recompute": dataclasses.replace(CONFIG, recompute="layer"),
    "expert_bias": dataclasses.replace(CONFIG, expert_bias=True),
    "both_losses": dataclasses.replace(CONFIG, global_coefficient=0.03),
}


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def params_of(config, dtype=jnp.float32):
    params = wbj.init_params(jax.random.key(1), config, dtype=dtype)
    for seed, name in enumerate(("router_bias", "b1", "b2")):
        if name in params:
            params[name] = 0.1 * normal(5 + seed, *params[name].shape, dtype=params[name].dtype)
    return params


def objective(block, d_out):
    def function(x, params):
        out, loss = block(x, params)
        return (out.astype(jnp.float32) * d_out).sum() + loss

    return jax.value_and_grad(function, argnums=(0, 1))


def ours(config, **options):
    def block(x, params):
        out, stats = wbj.moe_block(x, params, config, **options)
        return out, stats.loss

    return block


def theirs(config):
    return lambda x, params: reference.block(x, params, config)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values_and_gradients_in_float32(name, wrap):
    config = CONFIGS[name]
    x, params, d_out = normal(2, 3, 7, 8), params_of(config), normal(3, 3, 7, 8)
    got = wrap(objective(ours(config), d_out))(x, params)
    want = objective(theirs(config), d_out)(x, params)
    assert_trees_close(got, want, 1e-5)
    assert relative(got[1][1]["gate"], want[1][1]["gate"]) < 1e-5


def test_values_and_gradients_in_bfloat16():
    x, params, d_out = normal(2, 40, 8, dtype=jnp.bfloat16), params_of(CONFIG, jnp.bfloat16), normal(3, 40, 8)
    got = jax.jit(objective(ours(CONFIG), d_out))(x, params)
    want = objective(theirs(CONFIG), d_out)(x, params)
    assert_trees_close(got, want, 2e-2)


@pytest.mark.parametrize("saved_steps", [0, 1024])
def test_a_backward_without_its_step_computes_it_again(saved_steps):
    x, params, d_out = normal(2, 20, 8), params_of(CONFIG), normal(3, 20, 8)
    want = objective(theirs(CONFIG), d_out)(x, params)[1]
    (out, loss), backward = jax.vjp(ours(CONFIG, saved_steps=saved_steps), x, params)
    for _ in range(2):  # the second finds nothing either way
        assert_trees_close(backward((d_out, jnp.float32(1.0))), want, 1e-5)
    assert _ffi.load().wbx_num_saved_steps() == 0


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names(wbj.ROUTES)], ids=["nothing", "routes"])
def test_remat_gives_the_same_gradients_and_routes_spare_the_forward(policy):
    x, params, d_out = normal(2, 20, 8), params_of(CONFIG), normal(3, 20, 8)
    function = objective(jax.checkpoint(ours(CONFIG), policy=policy), d_out)
    assert_trees_close(jax.jit(function)(x, params), objective(theirs(CONFIG), d_out)(x, params), 1e-5)
    calls = jax.jit(function).lower(x, params).as_text().count("@waybill_moe_forward(")  # before XLA merges equal calls
    assert calls == (2 if policy is None else 1)


def test_vmap_and_scan():
    x, params, d_out = normal(2, 3, 5, 8), params_of(CONFIG), normal(3, 3, 5, 8)

    def batched(block):
        return lambda x, params: jax.tree.map(lambda leaf: leaf if leaf.ndim > 1 else leaf.sum(), jax.vmap(block, in_axes=(0, None))(x, params))

    want = objective(batched(theirs(CONFIG)), d_out)(x, params)
    assert_trees_close(objective(batched(ours(CONFIG)), d_out)(x, params), want, 1e-5)

    def stack(block):
        def layer(x, params):
            out, loss = block(x, params)
            return x + out, loss

        def layers(x, params):
            x, losses = jax.lax.scan(layer, x, params)
            return x, losses.sum()

        return layers

    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.9 * leaf, 1.1 * leaf]), params)
    want = objective(stack(theirs(CONFIG)), d_out)(x, stacked)
    assert_trees_close(jax.jit(objective(stack(ours(CONFIG)), d_out))(x, stacked), want, 2e-5)


def mesh_of(*axes):
    return jax.make_mesh(tuple(size for _, size in axes), tuple(name for name, _ in axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def sharded(config, mesh, data_axes, **options):
    def local(x, params):
        out, stats = wbj.moe_block(x, params, config, axis_name="ep", **options)
        return out, jax.lax.psum(stats.loss, data_axes)

    return jax.shard_map(local, mesh=mesh, in_specs=(P(data_axes), wbj.param_specs(config, "ep")), out_specs=(P(data_axes), P()))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("devices", [2, 4])
def test_devices_of_an_axis_compute_what_one_device_computes(name, devices):
    config = CONFIGS[name]
    x, params, d_out = normal(2, 24, 8), params_of(config), normal(3, 24, 8)
    block = sharded(config, mesh_of(("ep", devices)), "ep")
    got = jax.jit(objective(block, d_out))(x, params)
    assert_trees_close(got, objective(theirs(config), d_out)(x, params), 1e-5)
    for _ in range(3):  # the same bits again
        again = jax.jit(objective(block, d_out))(x, params)
        assert all((a == b).all() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again)))


def test_two_axes_are_separate_groups():
    x, params, d_out = normal(2, 24, 8), params_of(CONFIG), normal(3, 24, 8)
    block = sharded(dataclasses.replace(CONFIG, router=wbj.RouterConfig(E=8, K=2)), mesh_of(("data", 2), ("ep", 2)), ("data", "ep"))
    want = objective(theirs(dataclasses.replace(CONFIG, router=wbj.RouterConfig(E=8, K=2))), d_out)(x, params)
    assert_trees_close(jax.jit(objective(block, d_out))(x, params), want, 1e-5)


def test_layers_in_a_row_over_an_axis_many_times():
    """Many collective calls in flight on few threads: no rank meets another call's rank, nothing hangs."""
    params, d_out = params_of(CONFIG), normal(3, 24, 8)
    mesh = mesh_of(("ep", 4))

    def stack(block):
        def layers(x, params):
            total = 0.0
            for _ in range(4):
                out, loss = block(x, params)
                x, total = x + out, total + loss
            return x, total

        return layers

    step = jax.jit(objective(stack(sharded(CONFIG, mesh, "ep")), d_out))
    plain = jax.jit(objective(stack(theirs(CONFIG)), d_out))
    for seed in range(10):
        x = normal(seed, 24, 8)
        assert_trees_close(step(x, params), plain(x, params), 5e-5)


def test_an_overflow_skips_the_update_and_is_reported():
    config = dataclasses.replace(CONFIG, mode="captured", receive_factor=1.0)
    params = params_of(config)
    params["gate"] = params["gate"].at[0].set(5.0).at[1].set(4.0)  # positive rows go to experts 0 and 1, both on the first device
    mesh = mesh_of(("ep", 4))

    def local(x, params):
        out, stats = wbj.moe_block(x, params, config, axis_name="ep")
        return out, stats.status[None]

    block = jax.shard_map(local, mesh=mesh, in_specs=(P("ep"), wbj.param_specs(config, "ep")), out_specs=(P("ep"), P("ep")))
    monitor = wbj.OverflowMonitor(every_n_steps=2)
    out, status = block(normal(2, 24, 8), params)
    fine, kept = block(jnp.zeros((24, 8)), params)
    assert status[:, 0].tolist() == [0] * 4 and jnp.abs(out).max() == 0
    as_output = lambda status: wbj.MoeOutput(None, None, None, None, None, status)  # noqa: E731
    new = wbj.keep_if_valid(as_output(status[0]).valid, {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
    assert new["w"].tolist() == [0, 0]
    monitor.update(0, as_output(status))
    with pytest.raises(RuntimeError, match=r"steps 0 to 1: the slot budget overflowed \(demand \d+, capacity 12\).*raise receive_factor"):
        monitor.update(1, as_output(kept))


def test_a_step_of_a_group_that_has_lost_a_rank_is_not_reported_as_an_overflow():
    fine, lost = ([1, 5, 12, 3, 3, 0], [0, 5, 12, 0, 0, 8])
    monitor = wbj.OverflowMonitor(every_n_steps=2)
    for step, statuses in enumerate(([fine, fine], [fine, fine], [fine, lost])):
        monitor.update(step, wbj.MoeOutput(None, None, None, None, None, jnp.array(statuses, jnp.int32)))
    with pytest.raises(RuntimeError, match="steps 2 to 3: the group has lost a rank, results are worthless"):
        monitor.update(3, wbj.MoeOutput(None, None, None, None, None, jnp.array([fine, fine], jnp.int32)))


def test_padding_tokens_are_left_out():
    x, params = normal(2, 2, 5, 8), params_of(CONFIG)
    mask = jnp.zeros((2, 5), bool).at[1, 2:].set(True)
    out, stats = wbj.moe_block(x, params, CONFIG, padding_mask=mask)
    short, short_stats = wbj.moe_block(x[~mask], params, CONFIG)
    assert (out[~mask] == short).all() and jnp.abs(out[mask]).max() == 0
    assert stats.counts.sum() == 14 and relative(stats.loss, short_stats.loss) < 1e-6


def test_refusals_name_what_is_wrong():
    x, params = jnp.zeros((4, 8)), params_of(CONFIG)
    with pytest.raises(ValueError, match=r"x has shape \[4, 9\], needed is \[\*, 8\]"):
        wbj.moe_block(jnp.zeros((4, 9)), params, CONFIG)
    with pytest.raises(ValueError, match=r"params: missing \['w2'\], unknown \['wo'\]; needed are gate, w1, w2"):
        wbj.moe_block(x, {"gate": params["gate"], "w1": params["w1"], "wo": params["w2"]}, CONFIG)
    with pytest.raises(ValueError, match=r"params\['w2'\] has shape \[8, 6, 8\], needed is \[8, 8, 6\]"):
        wbj.moe_block(x, {**params, "w2": params["w2"].swapaxes(1, 2)}, CONFIG)
    with pytest.raises(ValueError, match="axis 'ep' is not bound"):
        wbj.moe_block(x, params, CONFIG, axis_name="ep")
    with pytest.raises(ValueError, match="capacity_factor"):
        wbj.moe_block(x, params, dataclasses.replace(CONFIG, capacity_factor=-1.0))
    with pytest.raises(ValueError, match="K = 9|K is 9"):
        jax.eval_shape(lambda x: wbj.moe_block(x, params, dataclasses.replace(CONFIG, router=wbj.RouterConfig(E=8, K=9)))[0], x)
    with pytest.raises(ValueError, match="mode is 'lazy', allowed are eager, captured"):
        wbj.moe_block(x, params, dataclasses.replace(CONFIG, mode="lazy"))
    odd = wbj.MoeConfig(H=8, F=6, router=wbj.RouterConfig(E=6, K=2))
    with pytest.raises(ValueError, match="E = 6 experts cannot be spread evenly over 4 ranks"):
        jax.shard_map(lambda x: wbj.moe_block(x, params_of(odd), odd, axis_name="ep")[0], mesh=mesh_of(("ep", 4)), in_specs=P("ep"), out_specs=P("ep"))(x)


def test_a_block_for_gpus_without_them_is_refused():
    """A library without CUDA says so; one with it misses the GPUs. Several of one process: local_test.py."""
    config = wbj.MoeConfig(H=8, F=8, router=wbj.RouterConfig(E=8, K=2), recipe="bf16")
    params = wbj.init_params(jax.random.key(1), config)
    block = jax.shard_map(lambda x, params: wbj.moe_block(x, params, config, axis_name="ep", platform="cuda")[0], mesh=mesh_of(("ep", 4)),
                          in_specs=(P("ep"), wbj.param_specs(config, "ep")), out_specs=P("ep"))  # fmt: skip
    with pytest.raises(RuntimeError, match=r"this process has no CUDA device|computes on the CPU only"):
        jax.eval_shape(block, normal(2, 24, 8), params)


def test_donated_arguments_are_used_again_and_change_nothing():
    """A step that donates its parameters and activations, and one that does not, in float32, where the block reads them as they are: the same bits."""
    x, params, d_out = normal(2, 20, 8), params_of(CONFIG), normal(3, 20, 8)

    def step(params, x):
        (_, (dx, gradients)) = objective(ours(CONFIG), d_out)(x, params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), x - dx

    want = jax.jit(step)(params, x)
    donating = jax.jit(step, donate_argnums=(0, 1))
    copies = jax.tree.map(jnp.copy, (params, x))
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(copies)}
    got = donating(*copies)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copies)) and pointers & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(got)}
    again, expected = donating(*got), jax.jit(step)(*want)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(expected), strict=True))


def test_the_block_over_an_axis_gathers_tickets_and_nothing_wide():
    """Aux losses come from local counts: XLA's collectives move the call's tickets and the caller's scalar, never a row of logits."""
    block = sharded(CONFIG, mesh_of(("ep", 4)), "ep")
    text = jax.jit(objective(block, normal(3, 24, 8))).lower(normal(2, 24, 8), params_of(CONFIG)).as_text()
    gathered = re.findall(r"all_gather.*?-> tensor<([^>]*)>", text, re.S)
    assert gathered and set(gathered) == {"4x3xui32"}, gathered
    reduced = re.findall(r"all_reduce.*?-> tensor<([^>]*)>", text, re.S)
    assert not any("x8x" in shape and shape.startswith(("6x", "24x")) for shape in reduced), reduced


def test_recipes_take_their_seed():
    config = wbj.MoeConfig(H=32, F=32, router=wbj.RouterConfig(E=4, K=2), recipe="nvfp4")
    x, params, d_out = normal(2, 64, 32), params_of(config), normal(3, 64, 32)

    def gradient(seed, saved_steps=8):
        loss = lambda x: (wbj.moe_block(x, params, config, rounding_seed=seed, saved_steps=saved_steps)[0] * d_out).sum()  # noqa: E731
        return jax.grad(loss)(x)

    want = jax.grad(lambda x: (reference.block(x, params, config)[0] * d_out).sum())(x)
    assert 0 < relative(gradient(7), want) < 0.8
    assert (gradient(7) == gradient(jnp.uint32(7), saved_steps=0)).all() and (gradient(7) != gradient(8)).any()
