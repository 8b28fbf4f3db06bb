# SPDX-License-Identifier: Apache-2.0
"""dispatch and combine as start/done pairs: the same bits and gradients, and the rows travel while XLA computes."""

import ctypes
import dataclasses
import functools
import glob
import gzip
import json

import jax
import jax.numpy as jnp
import pytest
import waybill.jax as wbj
from conftest import assert_trees_close
from jax.sharding import PartitionSpec as P
from waybill.jax import _ffi

T, H, E, K = 32, 8, 8, 2


def counts():
    numbers = [ctypes.c_int64() for _ in range(3)]
    _ffi.load().wbx_pending_counts(*numbers)
    return [number.value for number in numbers]


def routes(tokens):
    t = jnp.arange(tokens)
    return jnp.stack([t % E, (t + 1 + t % 3) % E], axis=1).astype(jnp.int16), 0.5 + (t[:, None] + jnp.arange(K)) % 5 / 4


def direct(x, ids, weights, between, **options):
    slots = wbj.dispatch(x, ids, weights, E=E, **options)
    return wbj.combine(jnp.tanh(slots.rows), ids, weights, E=E, **options), between()


def paired(x, ids, weights, between, **options):
    first = wbj.dispatch_start(x, ids, weights, E=E, **options)
    middle = between()
    slots = wbj.dispatch_done(first)
    return wbj.combine_done(wbj.combine_start(jnp.tanh(slots.rows), ids, weights, E=E, **options)), middle


def on_mesh(block, devices, between=lambda: jnp.zeros(())):
    mesh = jax.make_mesh((devices,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    local = functools.partial(block, between=between, axis_name="ep")
    return jax.shard_map(lambda *arrays: local(*arrays)[0], mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)],
                         ids=["plain", "remat", "all_saved"])  # fmt: skip
def test_pairs_give_the_bits_and_gradients_of_the_direct_calls(devices, wrap):
    x = jax.random.normal(jax.random.key(1), (T, H))
    ids, weights = routes(T)

    def objective(block):
        run = on_mesh(block, devices)
        return jax.jit(jax.value_and_grad(wrap(lambda x, weights: jnp.square(run(x, ids, weights)).sum()), argnums=(0, 1)))

    got, want = objective(paired)(x, weights), objective(direct)(x, weights)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    assert counts()[0] == 0  # nothing that was started is left


def test_work_held_between_start_and_done_gives_the_same_bits_and_gradients():
    x, w = jax.random.normal(jax.random.key(1), (T, H)), jax.random.normal(jax.random.key(2), (H, H))
    ids, weights = routes(T)

    def objective(held):
        def run(x, w):
            pending = wbj.dispatch_start(x, ids, weights, E=E)
            pending, y = wbj.overlap(pending, lambda x, w: jnp.tanh(x @ w), x, w) if held else (pending, jnp.tanh(x @ w))
            rows = wbj.dispatch_done(pending).rows
            pending = wbj.combine_start(rows, ids, weights, E=E)
            pending, y = wbj.overlap(pending, jnp.square, y) if held else (pending, jnp.square(y))
            return (wbj.combine_done(pending) * y).sum()

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1)))

    got, want = objective(True)(x, w), objective(False)(x, w)
    assert_trees_close(got, want, 1e-6)
    text = str(jax.make_jaxpr(objective(True))(x, w))
    assert text.count("optimization_barrier") >= 4 and "optimization_barrier" not in str(jax.make_jaxpr(objective(False))(x, w))
    batched = jax.vmap(objective(True), in_axes=(0, None))(jnp.stack([x, 2 * x]), w)
    assert_trees_close(jax.tree.map(lambda leaf: leaf[0], batched), want, 1e-6)


def test_a_pair_in_a_loop_and_under_vmap():
    x = jax.random.normal(jax.random.key(1), (3, T, H))
    ids, weights = routes(T)
    alone = lambda block: lambda x: block(x, ids, weights, lambda: 0)[0]  # noqa: E731
    assert_trees_close(jax.jit(jax.vmap(alone(paired)))(x), jax.vmap(alone(direct))(x), 1e-7)
    scan = lambda block: jax.lax.scan(lambda carry, row: (carry + alone(block)(row + carry), ()), x[0], x)[0]  # noqa: E731
    assert_trees_close(scan(paired), scan(direct), 1e-6)


def behind(value, first):
    """value, not before `first` is known: a dependence that no compiler can remove."""
    return jnp.where(first.reshape(-1)[0] == jnp.uint32(2**32 - 1), jnp.nan, value)


def test_a_trace_shows_work_between_start_and_done(tmp_path):
    """XLA computes behind the start and before the done, and the rows have come when done asks for them."""
    tokens, width = 512, 64
    x, matrix = jax.random.normal(jax.random.key(1), (tokens, width)), jax.random.normal(jax.random.key(2), (400, 400)) / 20
    ids, weights = routes(tokens)

    def started(x, ids, weights, value):
        pending = wbj.dispatch_start(x, ids, weights, E=E)
        value = behind(value, pending.handle)
        for _ in range(12):
            value = jnp.tanh(value @ value) + 0.1
        return wbj.dispatch_done(dataclasses.replace(pending, weights=behind(weights, value.astype(jnp.uint32)))).rows

    run = jax.jit(started)
    want = wbj.dispatch(x, ids, weights, E=E).rows
    assert (run(x, ids, weights, matrix) == want).all()
    _, done, ready = counts()
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(run(x, ids, weights, matrix))
    assert [a - b for a, b in zip(counts()[1:], (done, ready))] == [1, 1]
    (path,) = glob.glob(f"{tmp_path}/**/*.trace.json.gz", recursive=True)
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    start, done = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["name"].startswith("ffi_call"))
    between = [event for event in events if "tanh" in event["name"] and start[1] <= event["ts"] and event["ts"] + event["dur"] <= done[0]]
    assert len([event for event in between if not event["name"].startswith("end")]) > 8  # of 12; XLA may fuse the last ones with the done
