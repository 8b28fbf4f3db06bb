# SPDX-License-Identifier: Apache-2.0
"""The JAX ops on a GPU against the same ops on the CPU, which jax/ops_test.py holds against plain JAX. Programs run as command buffers, repeats bit-equal."""

import ctypes

import numpy as np
import pytest
from conftest import jax_gpus, needs_jax_gpu, relative

jax = pytest.importorskip("jax")
jnp = jax.numpy
wbj = pytest.importorskip("waybill.jax")
from waybill.jax import _ffi  # noqa: E402

pytestmark = needs_jax_gpu()


def on(device, tree):
    return jax.device_put(tree, device)


def both(function, *operands, repeats=3):
    """function's results on the CPU and on the GPU; there `repeats` runs with equal bits."""
    want = jax.jit(function)(*on(jax.devices("cpu")[0], operands))
    compiled, given = jax.jit(function), on(jax_gpus()[0], operands)
    runs = [jax.tree.map(np.asarray, compiled(*given)) for _ in range(repeats)]
    for other in runs[1:]:
        for a, b in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(other), strict=True):
            assert a.tobytes() == b.tobytes()
    return jax.tree.map(np.asarray, want), runs[0]


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 2e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("padded", [False, True])
def test_router_and_its_gradient(dtype, bound, score, padded):
    T, E, K = 300, 64, 6
    config = wbj.RouterConfig(E=E, K=K, score=score, aux_coefficient=0.1, z_coefficient=0.01, scaling_factor=1.5)
    mask = jnp.asarray(np.arange(T) % 5 == 2) if padded else None
    weights = normal(1, T, K)

    def run(logits, bias, d_weights, scales):
        def objective(logits):
            routes = wbj.router(logits, config, bias=bias, padding_mask=mask)
            return (routes.weights * d_weights).sum() + (routes.losses * scales).sum(), routes

        return jax.value_and_grad(objective, has_aux=True)(logits)

    want, got = both(run, normal(0, T, E, dtype=dtype), 0.1 * normal(2, E), weights, jnp.array([0.5, 1.0, 2.0]))
    (want_value, want_routes), want_gradient = want
    (value, routes), gradient = got
    assert (routes.ids == want_routes.ids).all() and (routes.counts == want_routes.counts).all()
    assert relative(routes.weights, want_routes.weights) < 1e-5 and relative(routes.losses, want_routes.losses) < 1e-5
    assert relative(np.float64(value).reshape(1), np.float64(want_value).reshape(1)) < 1e-4
    assert relative(gradient.astype(np.float64), want_gradient.astype(np.float64)) < bound


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("sizes", [[50, 0, 70, 10], [0, 0, 0, 0], [160, 0, 0, 0]], ids=["ragged", "empty", "one"])
@pytest.mark.parametrize("layout", ["LCN", "LNC"])
def test_grouped_matmul_and_its_gradients(dtype, bound, sizes, layout):
    S, C, N, L = 160, 72, 136, 4
    sizes = jnp.array(sizes, jnp.int32)

    def run(a, w, dy, sizes):
        y, pull = jax.vjp(lambda a, w: wbj.grouped_matmul(a, w, sizes, layout=layout), a, w)
        return y, *pull(dy)

    w = normal(4, L, *((C, N) if layout == "LCN" else (N, C)), dtype=dtype)
    want, got = both(run, normal(3, S, C, dtype=dtype), w, normal(5, S, N, dtype=dtype), sizes)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and relative(a.astype(np.float64), b.astype(np.float64)) < bound
    end = int(sizes.sum())
    assert abs(got[0][end:].astype(np.float32)).max(initial=0) == 0 and abs(got[1][end:].astype(np.float32)).max(initial=0) == 0
    for group in np.flatnonzero(np.asarray(sizes) == 0):
        assert abs(got[2][group].astype(np.float32)).max() == 0


def test_ragged_dot_is_jaxs_on_the_gpu():
    a, w, sizes = normal(3, 256, 64, dtype=jnp.bfloat16), normal(4, 4, 64, 128, dtype=jnp.bfloat16), jnp.array([100, 0, 56, 90], jnp.int32)
    a, w, sizes = on(jax_gpus()[0], (a, w, sizes))
    got = jax.jit(lambda *o: wbj.ragged_dot(*o, preferred_element_type=jnp.float32))(a, w, sizes)
    want = jax.jit(lambda a, w, sizes: jax.lax.ragged_dot(a.astype(jnp.float32), w.astype(jnp.float32), sizes, precision="highest"))(a, w, sizes)
    assert relative(np.asarray(got, np.float64), np.asarray(want, np.float64)) < 1e-5


def test_sizes_that_cannot_be_touch_nothing_outside():
    a, w = on(jax_gpus()[0], (normal(1, 32, 64, dtype=jnp.bfloat16), normal(2, 3, 64, 64, dtype=jnp.bfloat16)))
    for sizes, same_as in (([20, 1000, 5], [20, 12, 0]), ([-7, 10, 2], [0, 10, 2])):
        got, want = (np.asarray(wbj.grouped_matmul(a, w, on(jax_gpus()[0], jnp.array(s, jnp.int32))), np.float32) for s in (sizes, same_as))
        assert (got == want).all()


def test_a_chain_of_ops_runs_many_times_with_other_data():
    """Router, sort, two grouped matmuls: one program, whose command buffer must follow its operands."""
    T, H, E, K, F = 128, 64, 8, 2, 96
    config = wbj.RouterConfig(E=E, K=K, z_coefficient=0.01)
    parameters = {"gate": normal(1, E, H), "w1": normal(2, E, F, H, dtype=jnp.bfloat16), "w2": normal(3, E, H, F, dtype=jnp.bfloat16)}

    def loss(parameters, x):
        routes = wbj.router(jnp.matmul(x, parameters["gate"].T, precision="highest"), config)
        order = jnp.argsort(routes.ids.reshape(-1), stable=True)
        rows = x[order // K].astype(jnp.bfloat16)
        y = wbj.grouped_matmul(rows, parameters["w1"], routes.counts, layout="LNC")
        y = wbj.grouped_matmul(jax.nn.silu(y), parameters["w2"], routes.counts, layout="LNC").astype(jnp.float32)
        out = jnp.zeros_like(x).at[order // K].add(y * routes.weights.reshape(-1)[order, None])
        return jnp.square(out).mean() + routes.losses.sum()

    step = jax.jit(jax.value_and_grad(loss))
    given = on(jax_gpus()[0], parameters)
    for seed in range(6):
        x = normal(100 + seed, T, H)
        got, want = step(given, on(jax_gpus()[0], x)), step(on(jax.devices("cpu")[0], parameters), on(jax.devices("cpu")[0], x))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert relative(np.asarray(a, np.float64), np.asarray(b, np.float64)) < 3e-2


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_mx_codes_are_those_of_the_cpu(element):
    x = normal(2, 3, 5, 64) * jnp.exp2(normal(3, 3, 5, 64) * 4)
    want, got = both(lambda x: (*(parts := wbj.quantize_mx(x, element=element)), wbj.dequantize_mx(*parts)), x)
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_library_without_cuda_says_so(monkeypatch):
    monkeypatch.setattr(wbj._ffi, "has_cuda", lambda: False)
    with pytest.raises(NotImplementedError, match="logits is on gpu; this build of Waybill computes on the CPU only"):
        wbj.router(on(jax_gpus()[0], jnp.zeros((2, 4))), wbj.RouterConfig(E=4, K=1))


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("alignment, factor", [(1, 0.0), (16, 0.0), (1, 1.0), (8, 0.25)], ids=["plain", "aligned", "budget", "exceeded"])
def test_dispatch_and_combine_are_those_of_the_cpu(dtype, bound, alignment, factor):
    T, E, K, H = 70, 8, 3, 64
    rng = np.random.default_rng(7)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int16)
    ids[::9] = -1  # padding
    options = {"E": E, "alignment": alignment, "receive_factor": factor}

    def on_platform(platform):
        def run(ids, x, weights, d_out):
            def block(x, weights):
                slots = wbj.dispatch(x, ids, weights, **options, platform=platform)
                return wbj.combine(slots.rows * 2, ids, weights, **options, platform=platform), slots

            out, pull, slots = jax.vjp(block, x, weights, has_aux=True)
            return out, slots, pull(d_out)

        return jax.jit(run)

    given = jnp.asarray(ids), normal(1, T, H, dtype=dtype), normal(2, T, K), normal(3, T, H)
    want = jax.tree.map(np.asarray, on_platform("cpu")(*on(jax.devices("cpu")[0], given)))
    compiled, operands = on_platform("cuda"), on(jax_gpus()[0], given)
    runs = [jax.tree.map(np.asarray, compiled(*operands)) for _ in range(3)]
    for other in runs[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(other), strict=True))
    assert int(runs[0][1].valid) == (0 if factor == 0.25 else 1)
    for a, b in zip(jax.tree.leaves(runs[0][1]), jax.tree.leaves(want[1]), strict=True):  # rows, sizes, valid
        assert a.tobytes() == b.tobytes()
    for a, b in zip(jax.tree.leaves((runs[0][0], runs[0][2])), jax.tree.leaves((want[0], want[2])), strict=True):
        assert a.dtype == b.dtype and relative(a.astype(np.float64), b.astype(np.float64)) < bound


def pair_counts():
    """Done calls on GPUs so far, and those that found their start."""
    numbers = [ctypes.c_int64() for _ in range(2)]
    _ffi.load().wbx_device_pair_counts(*numbers)
    return np.array([number.value for number in numbers])


def pair_operands(dtype=jnp.float32):
    T, E, K, H = 96, 8, 3, 64
    rng = np.random.default_rng(7)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int16)
    return on(jax_gpus()[0], (normal(1, T, H, dtype=dtype), jnp.asarray(ids), normal(2, T, K), normal(3, H, H)))


def whole(x, ids, weights, other):
    slots = wbj.dispatch(x, ids, weights, E=8)
    return wbj.combine(jnp.tanh(slots.rows), ids, weights, E=8), other @ other


def paired(x, ids, weights, other):
    first = wbj.dispatch_start(x, ids, weights, E=8)
    between = other @ other  # independent work
    slots = wbj.dispatch_done(first)
    return wbj.combine_done(wbj.combine_start(jnp.tanh(slots.rows), ids, weights, E=8)), between


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pairs_give_the_bits_and_gradients_of_the_whole_calls(dtype):
    operands = pair_operands(dtype)

    def run(block):
        def objective(x, weights):
            out, between = block(x, operands[1], weights, operands[3])
            return jnp.square(out).sum() + between.sum(), out

        return jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))

    want, compiled, before = run(whole)(operands[0], operands[2]), run(paired), pair_counts()
    for repeat in range(1, 4):
        got = compiled(operands[0], operands[2])
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert (pair_counts() - before).tolist() == [2 * repeat, 2 * repeat]


def test_two_pairs_in_flight_and_pairs_in_a_loop_are_right():
    x, ids, weights, other = pair_operands()

    def two(x, ids, weights, other):
        pending = [wbj.dispatch_start(x * scale, ids, weights, E=8) for scale in (1.0, 2.0)]
        slots = [wbj.dispatch_done(one).rows for one in pending]
        return wbj.combine(jnp.tanh(slots[0]) + slots[1], ids, weights, E=8)

    rows = [wbj.dispatch(x * scale, ids, weights, E=8).rows for scale in (1.0, 2.0)]
    want = wbj.combine(jnp.tanh(rows[0]) + rows[1], ids, weights, E=8)
    for _ in range(3):
        assert np.asarray(jax.jit(two)(x, ids, weights, other)).tobytes() == np.asarray(want).tobytes()

    def loop(block):
        return jax.jit(lambda x: jax.lax.scan(lambda x, _: (block(x, ids, weights, other)[0].astype(x.dtype), None), x, None, length=4)[0])

    assert np.asarray(loop(paired)(x)).tobytes() == np.asarray(loop(whole)(x)).tobytes()


def test_a_pair_over_two_programs_is_the_whole_call():
    x, ids, weights, _ = pair_operands()
    pending = jax.jit(lambda *operands: wbj.dispatch_start(*operands, E=8))(x, ids, weights)
    got, want = jax.jit(wbj.dispatch_done)(pending), wbj.dispatch(x, ids, weights, E=8)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(got, want, strict=True))
