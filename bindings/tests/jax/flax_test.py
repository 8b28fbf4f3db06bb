# SPDX-License-Identifier: Apache-2.0
"""A small Flax language model trains the same with the plain JAX block and with ours."""

import jax
import jax.numpy as jnp
import pytest
import reference
import waybill.jax as wbj
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax", reason="flax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
from flax import linen as nn  # noqa: E402
from waybill.jax.flax import MoE  # noqa: E402

VOCABULARY, T, BATCH, STEPS = 17, 12, 8, 60
CONFIG = wbj.MoeConfig(H=16, F=24, router=wbj.RouterConfig(E=8, K=2, aux_coefficient=0.01, z_coefficient=1e-3))


class PlainMoE(nn.Module):
    config: wbj.MoeConfig

    @nn.compact
    def __call__(self, x, with_output=False):
        params = {name: self.param(name, nn.initializers.normal(dims[-1] ** -0.5), dims) for name, dims in self.config.shapes().items()}
        return reference.block(x, params, self.config)


class LanguageModel(nn.Module):
    """Two blocks of causal mean mixing and MoE."""

    moe: type
    axis_name: str | None = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, CONFIG.H)(tokens)
        total = 0.0
        for layer in range(2):
            mixed = jnp.cumsum(nn.Dense(CONFIG.H)(nn.LayerNorm()(x)), axis=1) / jnp.arange(1, tokens.shape[1] + 1)[:, None]
            x = x + mixed
            kind = {"axis_name": self.axis_name} if self.moe is MoE else {}
            out, stats = self.moe(CONFIG, name=f"moe_{layer}", **kind)(nn.LayerNorm()(x), with_output=True)
            total = total + (stats.loss if hasattr(stats, "loss") else stats)
            x = x + out
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x)), total


def batches():
    """Each token is the sum of the two before it: learnable, not constant."""
    key = jax.random.key(0)
    for step in range(STEPS):
        first = jax.random.randint(jax.random.fold_in(key, step), (BATCH, 2), 0, VOCABULARY)
        rows = [first[:, 0], first[:, 1]]
        while len(rows) < T + 1:
            rows.append((rows[-1] + rows[-2]) % VOCABULARY)
        yield jnp.stack(rows, axis=1)


def train(model):
    variables = LanguageModel(PlainMoE).init(jax.random.key(7), next(batches())[:, :-1])
    optimizer = optax.adam(1e-2)
    state = optimizer.init(variables)

    def loss_of(variables, tokens):
        logits, extra = model.apply(variables, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() + extra

    gradient = jax.value_and_grad(loss_of)

    @jax.jit
    def step(variables, state, tokens):
        loss, gradients = gradient(variables, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(variables, updates), state, loss

    losses = []
    for tokens in batches():
        variables, state, loss = step(variables, state, tokens)
        losses.append(float(loss))
    return losses


def test_loss_curves_of_the_plain_block_and_ours_agree():
    plain, ours = train(LanguageModel(PlainMoE)), train(LanguageModel(MoE))
    print("\nstep   plain    waybill")
    for step in range(0, STEPS, 10):
        print(f"{step:4} {plain[step]:8.5f} {ours[step]:8.5f}")
    assert plain[-1] < 0.8 * plain[0]
    for step, (a, b) in enumerate(zip(plain, ours)):
        assert abs(a - b) < (1e-4 if step < 10 else 2e-2) * a, (step, a, b)


def test_the_module_makes_its_parameters_and_sows_its_output():
    block = MoE(CONFIG)
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    variables = block.init(jax.random.key(0), x)
    assert {name: value.shape for name, value in variables["params"].items()} == CONFIG.shapes()
    out, state = block.apply(variables, x, mutable="intermediates")
    assert out.shape == x.shape and int(state["intermediates"]["moe"][0].counts.sum()) == 20


def test_two_devices_train_as_one():
    model = LanguageModel(MoE, "ep")
    one = train(LanguageModel(MoE))[:12]
    mesh_losses = train_on_axis(model)[:12]
    for a, b in zip(one, mesh_losses):
        assert abs(a - b) < 1e-3 * a


def train_on_axis(model):
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    variables = LanguageModel(PlainMoE).init(jax.random.key(7), next(batches())[:, :-1])
    optimizer = optax.adam(1e-2)
    state = optimizer.init(variables)
    specs = jax.tree_util.tree_map_with_path(lambda path, _: P("ep") if path[-1].key in ("w1", "w2") else P(), variables)

    def local(variables, tokens):
        logits, extra = model.apply(variables, tokens[:, :-1])
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return jax.lax.pmean(entropy, "ep") + jax.lax.psum(extra, "ep")

    loss_of = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("ep")), out_specs=P())

    @jax.jit
    def step(variables, state, tokens):
        loss, gradients = jax.value_and_grad(loss_of)(variables, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(variables, updates), state, loss

    losses = []
    for tokens in batches():
        variables, state, loss = step(variables, state, tokens)
        losses.append(float(loss))
    return losses
