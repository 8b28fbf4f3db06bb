# SPDX-License-Identifier: Apache-2.0
"""moe_block on a GPU against the plain JAX block in float32. Programs run as command buffers; repeats are bit-equal."""

import dataclasses

import numpy as np
import pytest
from conftest import reference as load_reference
from conftest import jax_gpus, needs_jax_gpu, relative

jax = pytest.importorskip("jax")
jnp = jax.numpy
wbj = pytest.importorskip("waybill.jax")

pytestmark = needs_jax_gpu()
plain = load_reference("jax")
LOSSES = {"aux_coefficient": 0.05, "z_coefficient": 0.01}
CONFIG = wbj.MoeConfig(H=64, F=48, router=wbj.RouterConfig(E=8, K=2, **LOSSES), recipe="bf16")
CONFIGS = {
    "plain": CONFIG,
    "shared": dataclasses.replace(CONFIG, shared_F=40),
    "sigmoid_bias": wbj.MoeConfig(H=64, F=48, router=wbj.RouterConfig(E=16, K=4, score="sigmoid", scaling_factor=2.5), router_bias=True, recipe="bf16"),
    "activation_again": dataclasses.replace(CONFIG, recompute="activation"),
    "all_again": dataclasses.replace(CONFIG, recompute="layer"),
    "every_expert": wbj.MoeConfig(H=64, F=48, router=wbj.RouterConfig(E=4, K=4), recipe="bf16"),
    "expert_bias": dataclasses.replace(CONFIG, expert_bias=True),
    "global_loss": dataclasses.replace(CONFIG, router=wbj.RouterConfig(E=8, K=2), global_coefficient=0.05),
    "both_losses": dataclasses.replace(CONFIG, global_coefficient=0.03),
    "budget": dataclasses.replace(CONFIG, mode="captured", receive_factor=1.0),
}


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.device_put(jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype), jax_gpus()[0])


def params_of(config, dtype=jnp.bfloat16):
    """Exact in bfloat16."""
    params = {name: value.astype(jnp.bfloat16).astype(dtype) for name, value in wbj.init_params(jax.random.key(1), config).items()}
    for seed, name in enumerate(("router_bias", "b1", "b2")):
        if name in params:
            given = jnp.float32 if name == "router_bias" else dtype
            params[name] = (0.1 * normal(5 + seed, *params[name].shape, dtype=jnp.float32)).astype(jnp.bfloat16).astype(given)
    return jax.device_put(params, jax_gpus()[0])


def objective(block, d_out):
    def function(x, params):
        out, loss = block(x, params)
        return (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum() + loss, out

    return jax.value_and_grad(function, argnums=(0, 1), has_aux=True)


def ours(config, **options):
    def block(x, params):
        out, stats = wbj.moe_block(x, params, config, **options)
        return out, stats.loss

    return block


def run(block, d_out, x, params, repeats=1):
    compiled = jax.jit(objective(block, d_out))
    runs = [jax.tree.map(np.asarray, compiled(x, params)) for _ in range(repeats)]
    for other in runs[1:]:
        assert same(runs[0], other)
    return runs[0]


def same(a, b):
    return all(np.asarray(one).tobytes() == np.asarray(two).tobytes() for one, two in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def theirs(config, d_out, x, params):
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (x, params))
        return run(lambda x, params: plain.block(x, params, config), d_out, *wide)


def assert_close(got, want, bound=2e-2):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(np.asarray(a, np.float64).reshape(-1), np.asarray(b, np.float64).reshape(-1)) < bound


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients(name, dtype):
    config = CONFIGS[name]
    x, d_out, params = normal(2, 5, 40, 64), normal(3, 5, 40, 64), params_of(config, dtype)
    (value, out), gradients = run(ours(config), d_out, x, params, repeats=3)
    (want_value, want_out), want = theirs(config, d_out, x, params)
    assert out.dtype == x.dtype and all(a.dtype == b.dtype for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves((x, params)), strict=True))
    assert_close(out, want_out)
    assert abs(float(value) - float(want_value)) < 2e-2 * abs(want_out * np.asarray(d_out, np.float32)).sum()
    gradients[1].pop("router_bias", None), want[1].pop("router_bias", None)
    assert_close(gradients, want)


def test_losses_counts_and_padding():
    x, params, mask = normal(2, 90, 64), params_of(CONFIG), np.arange(90) % 3 == 1
    out, stats = jax.jit(lambda x, params: wbj.moe_block(x, params, CONFIG, padding_mask=jnp.asarray(mask)))(x, params)
    out, stats = jax.tree.map(np.asarray, (out, stats))
    with jax.default_matmul_precision("highest"):
        kept = jnp.asarray(np.asarray(x, np.float32)[~mask])
        want, want_loss = plain.block(kept, params, CONFIG)
    assert_close(out[~mask], want)
    assert abs(out[mask].astype(np.float32)).max() == 0 and int(stats.valid) == 1 and stats.counts.sum() == 60 * 2
    assert abs(float(stats.loss) - float(want_loss)) < 1e-3 * float(want_loss)

    def loss(gate, x, mask):
        return wbj.moe_block(x, {**params, "gate": gate}, CONFIG, padding_mask=mask)[1].loss

    got = jax.jit(jax.grad(loss))(params["gate"], x, jnp.asarray(mask))
    with jax.default_matmul_precision("highest"):
        wanted = jax.grad(lambda gate: plain.block(kept, {**params, "gate": gate}, CONFIG)[1])(params["gate"].astype(jnp.float32))
    assert_close(got, wanted)


def test_each_loss_has_its_own_weight():
    config, x = dataclasses.replace(CONFIG, global_coefficient=0.03), normal(2, 90, 64)
    params = params_of(config, jnp.float32)

    @jax.jit
    def gradient(factors):
        return jax.grad(lambda gate: (wbj.moe_block(x, {**params, "gate": gate}, config)[1].losses * factors).sum())(params["gate"])

    one = [gradient(jnp.eye(4)[i]) for i in range(4)]
    assert_close(one[2] / 0.03, one[0] / 0.05, 1e-2)
    assert_close(gradient(jnp.array([2.0, 1.0, 3.0, 4.0])), 2 * one[0] + 3 * one[2] + 4 * one[3], 1e-2)


def test_a_scan_over_layers_keeps_every_layer_apart():
    """Forwards of all layers run before the first backward: each must find what its own forward left."""
    layers = [params_of(CONFIG) for _ in range(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack([leaf * (1 + 0.1 * i) for i, leaf in enumerate(leaves)]), *layers)
    x = normal(2, 70, 64)

    def scanned(x, stacked):
        out, losses = jax.lax.scan(lambda x, params: (lambda out, stats: (x + out, stats.loss))(*wbj.moe_block(x, params, CONFIG)), x, stacked)
        return out.astype(jnp.float32).square().mean() + losses.sum() if hasattr(out, "square") else jnp.square(out.astype(jnp.float32)).mean() + losses.sum()

    def unrolled(x, stacked):
        total = 0.0
        for i in range(4):
            out, stats = wbj.moe_block(x, jax.tree.map(lambda leaf, i=i: leaf[i], stacked), CONFIG)
            x, total = x + out, total + stats.loss
        return jnp.square(x.astype(jnp.float32)).mean() + total

    got, want = (jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(x, stacked) for function in (scanned, unrolled))
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("names", [(), ("SAVED",)], ids=["nothing saved", "saved"])
def test_remat_keeps_the_bits(names):
    x, d_out, params = normal(2, 70, 64), normal(3, 70, 64), params_of(CONFIG)
    policy = jax.checkpoint_policies.save_only_these_names(*(getattr(wbj, name) for name in names))
    assert same(run(ours(CONFIG), d_out, x, params), run(jax.checkpoint(ours(CONFIG), policy=policy), d_out, x, params))


def test_vmap_runs_one_call_an_element():
    x, params = normal(2, 3, 50, 64), params_of(CONFIG)
    got = jax.jit(jax.vmap(lambda x: wbj.moe_block(x, params, CONFIG)[0]))(x)
    assert same(got, jnp.stack([wbj.moe_block(part, params, CONFIG)[0] for part in x]))


def test_other_data_every_run():
    params, step = params_of(CONFIG), jax.jit(objective(ours(CONFIG), normal(3, 64, 64)))
    for seed in range(6):
        x = normal(100 + seed, 64, 64)
        with jax.disable_jit():
            want = objective(ours(CONFIG), normal(3, 64, 64))(x, params)
        assert_close(step(x, params), want, 1e-2)


def test_no_tokens_and_one_expert_for_all():
    params = params_of(CONFIG)
    out, stats = wbj.moe_block(normal(1, 0, 64), params, CONFIG)
    assert out.shape == (0, 64) and int(stats.valid) == 1 and np.asarray(stats.counts).sum() == 0
    config = dataclasses.replace(CONFIG, router=wbj.RouterConfig(E=8, K=1))
    params = {**params, "gate": jnp.zeros_like(params["gate"])}
    x, d_out = normal(2, 96, 64), normal(3, 96, 64)
    assert_close(run(ours(config), d_out, x, params)[1], theirs(config, d_out, x, params)[1])
    assert np.asarray(wbj.moe_block(x, params, config)[1].counts).tolist() == [96] + 7 * [0]


def test_an_exceeded_budget_skips_the_update_in_the_graph():
    config = dataclasses.replace(CONFIG, router=wbj.RouterConfig(E=8, K=1), mode="captured", receive_factor=0.5)
    params, x = params_of(config), normal(2, 64, 64)

    @jax.jit
    def step(params, x):
        (_, stats), gradients = jax.value_and_grad(lambda params: (lambda out, stats: (jnp.square(out.astype(jnp.float32)).sum(), stats))(
            *wbj.moe_block(x, params, config)), has_aux=True)(params)  # fmt: skip
        return wbj.keep_if_valid(stats.valid, jax.tree.map(lambda p, g: p - g, params, gradients), params), stats, gradients

    after, stats, gradients = step(params, x)
    assert int(stats.valid) == 0 and int(stats.status[1]) > int(stats.status[2]) and same(after, params)
    assert all(abs(np.asarray(leaf, np.float32)).max() == 0 for leaf in jax.tree.leaves(gradients))


def test_refusals_name_what_is_wrong():
    x, params = normal(2, 16, 64), params_of(CONFIG)
    with pytest.raises(NotImplementedError, match="the MoE layer on GPUs does not do recipes"):
        wbj.moe_block(x, params, dataclasses.replace(CONFIG, recipe="fp32"))
    on_cpu = jax.device_put((x, params), jax.devices("cpu")[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="traced for a GPU"):
        jax.block_until_ready(jax.jit(lambda x, params: wbj.moe_block(x, params, CONFIG, platform="cuda")[0])(*on_cpu))
    with pytest.raises(jax.errors.JaxRuntimeError, match="computes on the CPU only"):
        jax.block_until_ready(jax.jit(lambda x, params: wbj.moe_block(x, params, CONFIG, platform="cpu")[0])(x, params))
    got = jax.jit(lambda x, params: wbj.moe_block(x, params, CONFIG, platform="cpu")[0])(*on_cpu)
    assert_close(got, wbj.moe_block(x, params, CONFIG)[0])
