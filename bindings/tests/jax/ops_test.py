# SPDX-License-Identifier: Apache-2.0
"""The ops against plain JAX: values, gradients, jit, vmap, remat, shard_map, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import waybill.jax as wbj
from conftest import assert_trees_close, relative
from jax.sharding import PartitionSpec as P


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_values_and_gradients(dtype, bound, score):
    T, E, K = 33, 12, 3
    config = wbj.RouterConfig(E=E, K=K, score=score, aux_coefficient=0.1 if score == "softmax" else 0.0, z_coefficient=0.01, scaling_factor=1.5)
    logits, d_weights = normal(0, T, E, dtype=dtype), normal(1, T, K)

    def ours(logits):
        routes = wbj.router(logits, config)
        return (routes.weights * d_weights).sum() + 3 * routes.losses.sum(), routes

    def theirs(logits):
        ids, weights = reference.router(logits, config)
        return (weights * d_weights).sum() + 3 * sum(reference.losses(logits, ids, config)), (ids, weights)

    (got, routes), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(logits)
    (want, (ids, weights)), expected = jax.value_and_grad(theirs, has_aux=True)(logits.astype(jnp.float32))
    assert (routes.ids == ids).all() and relative(routes.weights, weights) < 1e-5 and relative(got, want) < 1e-5
    assert routes.counts.sum() == T * K and gradient.dtype == dtype
    assert relative(gradient, expected) < bound


def test_router_over_an_axis_sums_counts_not_logits():
    T, E, K = 32, 8, 2
    config = wbj.RouterConfig(E=E, K=K, aux_coefficient=0.1, z_coefficient=0.01)
    logits = normal(2, T, E)
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(logits):
        return jax.lax.psum(wbj.router(logits, config, axis_name="ep").losses.sum(), "ep")

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=P("ep"), out_specs=P())
    got, gradient = jax.jit(jax.value_and_grad(sharded))(logits)
    want, expected = jax.value_and_grad(lambda logits: sum(reference.losses(logits, reference.router(logits, config)[0], config)))(logits)
    assert relative(got, want) < 1e-5 and relative(gradient, expected) < 1e-5
    text = jax.jit(sharded).lower(logits).as_text()
    assert "all_gather" not in text and "all-gather" not in text


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("sizes", [[5, 0, 7, 1], [0, 0, 0, 0], [16, 0, 0, 0]], ids=["ragged", "empty", "one"])
def test_ragged_dot_is_a_drop_in(dtype, bound, sizes):
    a, w, sizes = normal(3, 16, 8, dtype=dtype), normal(4, 4, 8, 6, dtype=dtype), jnp.array(sizes, jnp.int32)
    dy = normal(5, 16, 6)

    def run(dot, a, w):
        return jax.value_and_grad(lambda a, w: (dot(a, w, sizes).astype(jnp.float32) * dy).sum(), argnums=(0, 1))(a, w)

    assert_trees_close(wbj.ragged_dot(a, w, sizes).astype(jnp.float32),
                       jax.lax.ragged_dot(a.astype(jnp.float32), w.astype(jnp.float32), sizes), bound)  # fmt: skip
    (_, gradients), (_, expected) = run(wbj.ragged_dot, a, w), run(jax.lax.ragged_dot, a.astype(jnp.float32), w.astype(jnp.float32))
    for mine, theirs in zip(gradients, expected):
        assert mine.dtype == dtype and relative(mine, theirs) < bound
    for group in np.flatnonzero(np.asarray(sizes) == 0):
        assert jnp.abs(gradients[1][group]).max() == 0
    assert_trees_close(wbj.ragged_dot(a, w, sizes, preferred_element_type=jnp.float32),
                       jax.lax.ragged_dot(a.astype(jnp.float32), w.astype(jnp.float32), sizes), 1e-5)  # fmt: skip


def test_grouped_matmul_in_the_other_layout():
    a, w, sizes = normal(3, 10, 8), normal(4, 3, 6, 8), jnp.array([4, 0, 6], jnp.int32)
    got = wbj.grouped_matmul(a, w, sizes, layout="LNC")
    assert_trees_close(got, wbj.grouped_matmul(a, w.swapaxes(1, 2), sizes), 1e-6)


def test_vmap_runs_one_call_an_element():
    config = wbj.RouterConfig(E=6, K=2, aux_coefficient=0.1)
    logits = normal(6, 3, 5, 6)
    batched = jax.vmap(lambda one: wbj.router(one, config))(logits)
    for i in range(3):
        assert_trees_close(jax.tree.map(lambda leaf: leaf[i], batched), wbj.router(logits[i], config), 1e-7)
    a, w, sizes = normal(7, 3, 5, 4), normal(8, 2, 4, 3), jnp.array([2, 3], jnp.int32)
    gradient = jax.grad(lambda w: jax.vmap(lambda a: wbj.ragged_dot(a, w, sizes))(a).sum())(w)
    assert relative(gradient, jax.grad(lambda w: sum(wbj.ragged_dot(a[i], w, sizes).sum() for i in range(3)))(w)) < 1e-5


def compose(x, params, config, axis_name=None, **options):
    """An MoE block from the ops."""
    E = config.router.E
    routes = wbj.router(x @ params["gate"].T, config.router, axis_name=axis_name)
    slots = wbj.dispatch(x, routes.ids, routes.weights, E=E, axis_name=axis_name, **options)
    left, right = jnp.split(wbj.grouped_matmul(slots.rows, params["w1"], slots.group_sizes, layout="LNC"), 2, axis=-1)
    y = wbj.grouped_matmul(jax.nn.silu(left) * right, params["w2"], slots.group_sizes, layout="LNC")
    return wbj.combine(y, routes.ids, routes.weights, E=E, axis_name=axis_name, **options), routes.losses.sum(), slots


CONFIG = wbj.MoeConfig(H=8, F=6, router=wbj.RouterConfig(E=8, K=2, aux_coefficient=0.05, z_coefficient=0.01))


def objective(block):
    def function(x, params):
        out, loss, *_ = block(x, params)
        return jnp.square(out).sum() + loss

    return jax.value_and_grad(function, argnums=(0, 1))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
@pytest.mark.parametrize("alignment", [1, 8])
def test_ops_on_one_device_make_the_block(wrap, alignment):
    x, params = normal(9, 20, 8), wbj.init_params(jax.random.key(1), CONFIG)
    got = jax.jit(objective(wrap(lambda x, params: compose(x, params, CONFIG, alignment=alignment))))(x, params)
    assert_trees_close(got, objective(lambda x, params: reference.block(x, params, CONFIG))(x, params), 1e-5)


@pytest.mark.parametrize("options", [{}, {"receive_factor": 3.0}, {"alignment": 4}, {"hierarchy": "two_level"}],
                         ids=["worst_case", "budget", "aligned", "two_level"])  # fmt: skip
def test_dispatch_and_combine_over_an_axis(options):
    x, params = normal(9, 32, 8), wbj.init_params(jax.random.key(1), CONFIG)
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, params):
        out, loss, slots = compose(x, params, CONFIG, "ep", **options)
        return out, jax.lax.psum(loss, "ep"), slots.valid[None]

    block = jax.shard_map(local, mesh=mesh, in_specs=(P("ep"), wbj.param_specs(CONFIG, "ep")), out_specs=(P("ep"), P(), P("ep")))
    assert jax.jit(block)(x, params)[2].tolist() == [1, 1, 1, 1]
    got = jax.jit(objective(block))(x, params)
    assert_trees_close(got, objective(lambda x, params: reference.block(x, params, CONFIG))(x, params), 1e-5)


def test_an_overflow_is_told_on_every_device_and_gives_zeros():
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    ids, weights = jnp.zeros((32, 1), jnp.int16), jnp.ones((32, 1))  # all to the first device: 32 slots, the budget is 1.0 * 8

    def local(x, ids, weights):
        slots = wbj.dispatch(x, ids, weights, E=8, axis_name="ep", receive_factor=1.0)
        return slots.rows, slots.group_sizes, slots.valid[None], wbj.combine(slots.rows, ids, weights, E=8, axis_name="ep", receive_factor=1.0)

    rows, sizes, valid, out = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(normal(1, 32, 4), ids, weights)
    assert valid.tolist() == [0] * 4 and rows.shape == (32, 4)
    assert jnp.abs(rows).max() == 0 and sizes.sum() == 0 and jnp.abs(out).max() == 0


def test_permute_and_unpermute_by_hand():
    x = jnp.arange(6.0).reshape(3, 2)
    ids, weights = jnp.array([[1, 0], [1, -1], [2, 1]], jnp.int16), jnp.array([[0.5, 1], [2, 0], [1, 1]])
    slots = wbj.permute(x, ids, weights, E=4)
    assert slots.group_sizes.tolist() == [1, 3, 1, 0] and slots.rows.shape == (6, 2)
    assert slots.rows[:5, 0].tolist() == [0, 0, 2, 4, 4] and slots.rows[5].tolist() == [0, 0]
    out = wbj.unpermute(slots.rows, ids, weights, E=4)
    assert out.tolist() == [[0, 1.5], [4, 6], [8, 10]]


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_mx_blocks_there_and_back(element):
    x = normal(2, 3, 5, 64) * jnp.exp2(normal(3, 3, 5, 64) * 4)
    codes, scales = jax.jit(lambda x: wbj.quantize_mx(x, element=element))(x)
    assert codes.shape == x.shape and scales.shape == (3, 5, 2) and scales.dtype == jnp.uint8
    back = wbj.dequantize_mx(codes, scales)
    blocks, errors = x.reshape(3, 5, 2, 32), jnp.abs(back - x).reshape(3, 5, 2, 32)
    bound = jnp.exp2(scales.astype(jnp.float32) - 127)[..., None] * (16 if element == "e4m3" else 4096)
    assert (errors <= bound).all() and (jnp.abs(blocks) <= jnp.exp2(scales.astype(jnp.float32) - 127)[..., None] * (448 if element == "e4m3" else 57344)).all()
    exact = jnp.tile(jnp.array([1.0, -2, 0, 4]), 16)[None]
    assert (wbj.dequantize_mx(*wbj.quantize_mx(exact, element=element)) == exact).all()


def test_refusals_name_what_is_wrong():
    config = wbj.RouterConfig(E=4, K=2)
    with pytest.raises(ValueError, match="logits is int32, allowed are float32, bfloat16, float16"):
        wbj.router(jnp.zeros((2, 4), jnp.int32), config)
    with pytest.raises(ValueError, match=r"logits has shape \[2, 5\], needed is \[T, 4\]"):
        wbj.router(jnp.zeros((2, 5)), config)
    with pytest.raises(ValueError, match="axis 'ep' is not bound; call this inside jax.shard_map"):
        wbj.router(jnp.zeros((2, 4)), config, axis_name="ep")
    with pytest.raises(ValueError, match="K is 9|K = 9"):
        wbj.router(jnp.zeros((2, 4)), wbj.RouterConfig(E=4, K=9))
    with pytest.raises(ValueError, match=r"weights has shape \[2, 5, 3\], needed is \[L, 4, N\]"):
        wbj.ragged_dot(jnp.zeros((2, 4)), jnp.zeros((2, 5, 3)), jnp.zeros(2, jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"group_sizes\[1\] = 9 is negative or passes the 2 rows"):
        wbj.ragged_dot(jnp.zeros((2, 4)), jnp.zeros((2, 4, 3)), jnp.array([0, 9], jnp.int32))
    with pytest.raises(NotImplementedError, match="group_offset is not supported"):
        wbj.ragged_dot(jnp.zeros((2, 4)), jnp.zeros((2, 4, 3)), jnp.zeros(2, jnp.int32), group_offset=jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="last dimension must be a multiple of 32"):
        wbj.quantize_mx(jnp.zeros((2, 33)))
    with pytest.raises(ValueError, match="y has 3 slots, the budget of these arguments is 4"):
        wbj.combine(jnp.zeros((3, 8)), jnp.zeros((2, 2), jnp.int16), jnp.zeros((2, 2)), E=4)
    with pytest.raises(ValueError, match="hierarchy"):
        wbj.dispatch(jnp.zeros((2, 8)), jnp.zeros((2, 2), jnp.int16), jnp.zeros((2, 2)), E=4, hierarchy="both")
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="E = 6 experts cannot be spread evenly over the 4 devices of axis 'ep'"):
        jax.shard_map(lambda x, i, w: wbj.dispatch(x, i, w, E=6, axis_name="ep").rows, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(
            jnp.zeros((4, 8)), jnp.zeros((4, 2), jnp.int16), jnp.zeros((4, 2)))  # fmt: skip
