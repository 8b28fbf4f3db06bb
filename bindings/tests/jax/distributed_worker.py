# SPDX-License-Identifier: Apache-2.0
"""distributed_worker.py SCENARIO PROCESS PROCESSES DEVICES PORT: one process of distributed_test.py. Prints what it saw as lines of JSON."""

import dataclasses
import functools
import json
import os
import sys

import jax
import numpy as np

scenario, process, processes, devices, port = sys.argv[1], *map(int, sys.argv[2:])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)

import jax.numpy as jnp  # noqa: E402
import reference  # noqa: E402
import waybill.jax as wbj  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

CONFIG = wbj.MoeConfig(H=8, F=6, router=wbj.RouterConfig(E=8, K=2, aux_coefficient=0.05, z_coefficient=0.01), shared_F=5)
MESH = jax.make_mesh((processes * devices,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
SPECS = wbj.param_specs(CONFIG, "ep")
ROWS = 8 * processes * devices


def tell(**values):
    print(json.dumps({"process": process, **values}), flush=True)


def normal(seed, *shape):
    return np.asarray(jax.random.normal(jax.random.key(seed), shape))


def spread(array, spec):
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(MESH, spec), lambda index: array[index])


def error_here(got, want):
    """The largest error of this process's part, over the largest value of the whole."""
    want = np.asarray(want)
    whole = max(np.abs(want).max(), 1e-30)
    return max(float(np.abs(np.asarray(shard.data) - want[shard.index]).max() / whole) for shard in got.addressable_shards)


def worst(got, want):
    return max(error_here(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def shard(local, in_specs, out_specs):
    return jax.shard_map(local, mesh=MESH, in_specs=in_specs, out_specs=out_specs)


PARAMS = wbj.init_params(jax.random.key(1), CONFIG)
GLOBAL = {name: spread(value, SPECS[name]) for name, value in PARAMS.items()}
x, d_out = normal(2, ROWS, 8), normal(3, ROWS, 8)


def objective(block):
    def function(x, params, d_out):
        out, loss = block(x, params)
        return (out * d_out).sum() + loss

    return jax.jit(jax.value_and_grad(function, argnums=(0, 1)))


def plain(x, params):
    return reference.block(x, params, CONFIG)


def block():
    def local(x, params):
        out, stats = wbj.moe_block(x, params, CONFIG, axis_name="ep")
        return out, jax.lax.psum(stats.loss, "ep")

    step = objective(shard(local, (P("ep"), SPECS), (P("ep"), P())))
    want = objective(plain)(x, PARAMS, d_out)
    errors = [worst(step(spread(x, P("ep")), GLOBAL, spread(d_out, P("ep"))), want) for _ in range(3)]
    again = [worst(step(spread(x, P("ep")), GLOBAL, spread(d_out, P("ep"))), want) for _ in range(20)]
    tell(errors=errors, equal=len(set(again)) == 1)


def ops(pairs):
    """An MoE block from the ops, without its shared expert; `pairs`: dispatch and combine as start and done."""
    E, router = CONFIG.router.E, CONFIG.router

    def local(x, params):
        routes = wbj.router(x @ params["gate"].T, router, axis_name="ep")
        place = functools.partial(dict, E=E, axis_name="ep")
        if pairs:
            slots = wbj.dispatch_done(wbj.dispatch_start(x, routes.ids, routes.weights, **place()))
        else:
            slots = wbj.dispatch(x, routes.ids, routes.weights, **place())
        left, right = jnp.split(wbj.grouped_matmul(slots.rows, params["w1"], slots.group_sizes, layout="LNC"), 2, axis=-1)
        y = wbj.grouped_matmul(jax.nn.silu(left) * right, params["w2"], slots.group_sizes, layout="LNC")
        if pairs:
            out = wbj.combine_done(wbj.combine_start(y, routes.ids, routes.weights, **place()))
        else:
            out = wbj.combine(y, routes.ids, routes.weights, **place())
        return out, jax.lax.psum(routes.losses.sum(), "ep")

    bare = {name: value for name, value in PARAMS.items() if "shared" not in name}
    specs = {name: SPECS[name] for name in bare}
    step = objective(shard(local, (P("ep"), specs), (P("ep"), P())))
    want = objective(lambda x, params: reference.block(x, params, dataclasses.replace(CONFIG, shared_F=0)))(x, bare, d_out)
    tell(errors=[worst(step(spread(x, P("ep")), {name: GLOBAL[name] for name in bare}, spread(d_out, P("ep"))), want) for _ in range(3)])


def refused(config):
    def local(x, params):
        return wbj.moe_block(x, params, config, axis_name="ep")[0]

    run = jax.jit(shard(local, (P("ep"), SPECS), P("ep")))
    try:
        jax.block_until_ready(run(spread(x, P("ep")), GLOBAL))
        tell(error="none")
    except Exception as error:  # noqa: BLE001 - the test looks at the text
        tell(error=str(error))


def mixed():
    """The processes have another coefficient: XLA sees the same shapes, the layer must not."""
    refused(dataclasses.replace(CONFIG, router=dataclasses.replace(CONFIG.router, z_coefficient=0.01 * (1 + process))))


def given():
    """What the processes compare before they make a group on GPUs."""
    from jax._src import distributed
    from waybill.jax import _mesh

    values = _mesh.gather(1, "layer", bytes([process]) * 3)
    try:
        _mesh.gather(2, ["layer", "exchange"][process], b"x")
        error = "none"
    except RuntimeError as refusal:
        error = str(refusal)
    client = distributed.global_state.client
    # Process 0 keeps the store: it ends when the other has read it.
    if process:
        client.key_value_set("read", "1")
    else:
        client.blocking_key_value_get("read", 60000)
    tell(values=[value.hex() for value in values], error=error)


SCENARIOS = {"block": block, "ops": lambda: ops(False), "pairs": lambda: ops(True), "mixed": mixed, "given": given}
SCENARIOS[scenario]()
sys.stdout.flush()
os._exit(0)  # without jax.distributed's shutdown barrier, which waits long after a failed program
