# SPDX-License-Identifier: Apache-2.0
"""jax_ep_worker.py PROCESS PROCESSES PORT [GPUS]: moe_block over an axis of one process a GPU against the block with all experts on this GPU.

Prints "process N: passed".

With PLAY_NODES=1 every process is a node of its own, as NCCL sees it, and all take GPU 0: rows go over sockets. With one process its GPUS are the ranks; one
GPU alone takes the path of several all the same."""

import dataclasses
import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
index, processes, port = (int(argument) for argument in sys.argv[1:4])
P = processes if processes > 1 else int(sys.argv[4])
PLAY_NODES = os.environ.get("PLAY_NODES") == "1"
HIERARCHY = "two_level" if PLAY_NODES else "flat"
if PLAY_NODES:
    os.environ.update(NCCL_HOSTID=f"node {index}", NCCL_SOCKET_IFNAME="lo")

import jax  # noqa: E402

if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", P, index, local_device_ids=[0 if PLAY_NODES else index])

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import waybill.jax as wbj  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as Spec  # noqa: E402

CONFIG = wbj.MoeConfig(H=64, F=48, router=wbj.RouterConfig(E=8, K=3, aux_coefficient=0.05, z_coefficient=0.01), recipe="bf16", shared_F=40,
                       hierarchy=HIERARCHY)  # fmt: skip
T = 120


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return abs(got - want).max() / max(abs(want).max(), 1e-30)


def shards(array, mesh):
    """(rank, what it has) of each device of this process."""
    devices = list(mesh.devices.flat)
    return [(devices.index(shard.device), np.asarray(shard.data)) for shard in array.addressable_shards]


def always_local():
    """One GPU is a group within the process, too."""
    from waybill.jax import _device_block, _local

    def ensure(what, struct, axis_name, P, indices=(0,)):
        return _local.Group(f"wbx_make_local_{what}", type(struct), bytes(struct), axis_name, P, indices)

    _device_block.ensure = ensure


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
        assert all((part == K * x[rank * T : (rank + 1) * T]).all() for rank, part in shards(out, mesh))
        L = E // P
        counts = np.bincount(ids.reshape(-1), minlength=E)
        assert all(part.tolist() == counts[rank * L : (rank + 1) * L].tolist() for rank, part in shards(sizes, mesh))
        assert all(part[0] == 1 for _, part in shards(valid, mesh))


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


def train_step(mesh, specs, rows):
    """value, (out, counts, status), gradients of the loss over all tokens; `rows`: how they are spread over the mesh."""

    def body(params, x, d_out):
        value, results = local(params, x, d_out, "expert")
        return jax.lax.psum(value, mesh.axis_names), results

    def spread(params, x, d_out):
        return jax.shard_map(body, mesh=mesh, in_specs=(specs, rows, rows), out_specs=(Spec(), (rows, rows, rows)))(params, x, d_out)

    return jax.jit(jax.value_and_grad(spread, argnums=(0, 1), has_aux=True))


def local(params, x, d_out, axis_name=None):
    out, stats = wbj.moe_block(x, params, CONFIG, axis_name=axis_name)
    return (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum() + stats.loss, (out, stats.counts, stats.status)


def main():
    devices = np.array(jax.devices()[:P])
    mesh = Mesh(devices, ("expert",))
    assert [device.process_index for device in devices] == (list(range(P)) if processes > 1 else P * [0])
    rng = np.random.default_rng(3)
    params = {name: rng.standard_normal(dims, np.float32) * dims[-1] ** -0.5 for name, dims in CONFIG.shapes().items()}
    x, d_out = (rng.standard_normal((P * T, CONFIG.H), np.float32) for _ in range(2))
    params, x, d_out = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf).astype(jnp.bfloat16)), (params, x, d_out))
    specs = wbj.param_specs(CONFIG, "expert")
    with jax.default_device(jax.local_devices()[0]):
        whole = jax.jit(jax.value_and_grad(local, argnums=(0, 1), has_aux=True))
        (want_value, (want_out, _, _)), (want_p, want_x) = whole(params, x, d_out)
    if P == 1:
        always_local()

    def put_on(mesh):
        return lambda array, spec: jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda part: array[part])

    def check(mesh, rows, repeats):
        put, step = put_on(mesh), train_step(mesh, specs, rows)
        params_d = {name: put(value, specs[name]) for name, value in params.items()}
        x_d, d_d = put(x, rows), put(d_out, rows)
        first = None
        for _ in range(repeats):
            (value, (out, counts, status)), (got_p, got_x) = step(params_d, x_d, d_d)
            mine = [part.tobytes() for _, part in shards(out, mesh)]
            assert first is None or mine == first
            first = mine
        groups = P // mesh.shape["expert"]
        assert all(part.sum() == P * T * CONFIG.router.K / groups for _, part in shards(counts, mesh)) and all(part[0] == 1 for _, part in shards(status, mesh))
        for (rank, got), (_, got_dx) in zip(shards(out, mesh), shards(got_x, mesh)):
            part = slice(rank * T, (rank + 1) * T)
            assert relative(got, want_out[part]) < 1e-2 and (groups > 1 or relative(got_dx, want_x[part]) < 1e-2)
        if groups == 1:  # else every group has the auxiliary losses of its own tokens
            assert relative(np.asarray(value.addressable_shards[0].data), want_value) < 1e-2
        for name, gradient in got_p.items():
            L = CONFIG.router.E // mesh.shape["expert"]
            for rank, got in shards(gradient, mesh):
                group_rank = rank % mesh.shape["expert"]
                wanted = want_p[name][group_rank * L : (group_rank + 1) * L] if specs[name] != Spec() else want_p[name]
                error = relative(got, wanted)
                assert error < (1e-2 if groups == 1 or name != "gate" else 5e-2), (name, rank, error)
        return params_d, x_d

    params_d, x_d = check(mesh, Spec("expert"), 4)
    routes(mesh, put_on(mesh))
    if processes > 1:
        differing(mesh, params_d, x_d)
    else:
        routes(Mesh(devices[::-1], ("expert",)), put_on(Mesh(devices[::-1], ("expert",))))
        if P >= 4:  # two groups side by side
            check(Mesh(devices.reshape(-1, 2), ("data", "expert")), Spec(("data", "expert")), 2)
    print(f"process {index}: passed", flush=True)
    os._exit(0)


main()
