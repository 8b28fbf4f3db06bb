# SPDX-License-Identifier: Apache-2.0
"""jax_ep_worker.py PROCESS PROCESSES PORT: moe_block over an axis of one process a GPU against the block with all experts on this GPU.

Prints "process N: passed".

With PLAY_NODES=1 every process is a node of its own, as NCCL sees it, and all take GPU 0: rows go over sockets."""

import dataclasses
import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
index, P, port = (int(argument) for argument in sys.argv[1:4])
PLAY_NODES = os.environ.get("PLAY_NODES") == "1"
HIERARCHY = "two_level" if PLAY_NODES else "flat"
if PLAY_NODES:
    os.environ.update(NCCL_HOSTID=f"node {index}", NCCL_SOCKET_IFNAME="lo")

import jax  # noqa: E402

jax.distributed.initialize(f"127.0.0.1:{port}", P, index, local_device_ids=[0 if PLAY_NODES else index])

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import waybill.jax as wbj  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as Spec  # noqa: E402

CONFIG = wbj.MoeConfig(H=64, F=48, router=wbj.RouterConfig(E=8, K=3, aux_coefficient=0.05, z_coefficient=0.01), recipe="bf16", shared_F=40,
                       hierarchy=HIERARCHY)  # fmt: skip
T = 120


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return abs(got - want).max() / max(abs(want).max(), 1e-30)


def routes(mesh, put):
    """dispatch and combine with experts that change nothing and unit weights: each token comes back K times, exactly."""
    E, K = 8, 3
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(P * T)]).astype(np.int16)
    x = rng.integers(-15, 16, (P * T, 64)).astype(np.float32)

    def body(x, ids, weights):
        slots = wbj.dispatch(x, ids, weights, E=E, axis_name="expert", hierarchy=HIERARCHY)
        return wbj.combine(slots.rows, ids, weights, E=E, axis_name="expert", hierarchy=HIERARCHY), slots.group_sizes, slots.valid.reshape(1)

    def pairs(x, ids, weights):
        first = wbj.dispatch_start(x, ids, weights, E=E, axis_name="expert", hierarchy=HIERARCHY)
        slots = wbj.dispatch_done(first)
        second = wbj.combine_start(slots.rows, ids, weights, E=E, axis_name="expert", hierarchy=HIERARCHY)
        return wbj.combine_done(second), slots.group_sizes, slots.valid.reshape(1)

    steps = [jax.jit(jax.shard_map(function, mesh=mesh, in_specs=Spec("expert"), out_specs=Spec("expert"))) for function in (body, pairs)]
    for step in 3 * steps:
        out, sizes, valid = step(*(put(array, Spec("expert")) for array in (x, ids, np.ones((P * T, K), np.float32))))
        assert (np.asarray(out.addressable_shards[0].data) == K * x[index * T : (index + 1) * T]).all()
        L = E // P
        assert np.asarray(sizes.addressable_shards[0].data).tolist() == np.bincount(ids.reshape(-1), minlength=E)[index * L : (index + 1) * L].tolist()
        assert int(valid.addressable_shards[0].data[0]) == 1


def differing(mesh, params, x):
    """Configs that differ between the processes are named on each of them, when the program is traced and makes their layer: none of them is one that
    this process has already made."""
    other = dataclasses.replace(CONFIG, router=dataclasses.replace(CONFIG.router, z_coefficient=0.02 * (1 + index)))
    block = jax.shard_map(lambda params, x: wbj.moe_block(x, params, other, axis_name="expert")[0], mesh=mesh,
                          in_specs=(wbj.param_specs(CONFIG, "expert"), Spec("expert")), out_specs=Spec("expert"))  # fmt: skip
    try:
        jax.jit(block).lower(params, x)
    except ValueError as error:
        assert "MoE configs differ between ranks: rank 0 has router.z_coefficient = 0.0" in str(error) and "rank 1 has" in str(error), error
    else:
        raise AssertionError("differing configs were accepted")


def main():
    mesh = jax.make_mesh((P,), ("expert",))
    assert [device.process_index for device in mesh.devices] == list(range(P))
    rng = np.random.default_rng(3)
    params = {name: rng.standard_normal(dims, np.float32) * dims[-1] ** -0.5 for name, dims in CONFIG.shapes().items()}
    x, d_out = (rng.standard_normal((P * T, CONFIG.H), np.float32) for _ in range(2))
    bf16 = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.bfloat16), tree)  # noqa: E731

    def local(params, x, d_out, axis_name=None):
        out, stats = wbj.moe_block(x, params, CONFIG, axis_name=axis_name)
        return (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum() + stats.loss, (out, stats.counts, stats.status)

    def whole(params, x, d_out):
        (value, results), gradients = jax.value_and_grad(local, argnums=(0, 1), has_aux=True)(params, x, d_out)
        return value, results, gradients

    specs = wbj.param_specs(CONFIG, "expert")

    def spread(params, x, d_out):
        def body(params, x, d_out):
            value, results = local(params, x, d_out, "expert")
            return jax.lax.psum(value, "expert"), results

        return jax.shard_map(body, mesh=mesh, in_specs=(specs, Spec("expert"), Spec("expert")),
                             out_specs=(Spec(), (Spec("expert"), Spec("expert"), Spec("expert"))))(params, x, d_out)  # fmt: skip

    step = jax.jit(jax.value_and_grad(spread, argnums=(0, 1), has_aux=True))
    with jax.default_device(jax.local_devices()[0]):
        want_value, (want_out, _, _), (want_p, want_x) = jax.jit(whole)(*(bf16(value) for value in (params, x, d_out)))

    def put(array, spec):
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda part: array[part])

    params_d = {name: put(np.asarray(value), specs[name]) for name, value in bf16(params).items()}
    x_d, d_d = (put(np.asarray(bf16(value)), Spec("expert")) for value in (x, d_out))
    first = None
    for _ in range(4):
        (value, (out, counts, status)), (got_p, got_x) = step(params_d, x_d, d_d)
        local_out = np.asarray(out.addressable_shards[0].data)
        assert first is None or local_out.tobytes() == first.tobytes()
        first = local_out
    mine = slice(index * T, (index + 1) * T)
    assert np.asarray(counts.addressable_shards[0].data).sum() == P * T * CONFIG.router.K and np.asarray(status.addressable_shards[0].data)[0] == 1
    assert relative(local_out, want_out[mine]) < 1e-2 and relative(got_x.addressable_shards[0].data, want_x[mine]) < 1e-2
    assert relative(np.asarray(value.addressable_shards[0].data), want_value) < 1e-2
    for name, gradient in got_p.items():
        L = CONFIG.router.E // P
        wanted = want_p[name][index * L : (index + 1) * L] if specs[name] != Spec() else want_p[name]
        error = relative(gradient.addressable_shards[0].data, wanted)
        assert error < 1e-2, (name, error)
    routes(mesh, put)
    differing(mesh, params_d, x_d)
    print(f"process {index}: passed", flush=True)
    os._exit(0)


main()
