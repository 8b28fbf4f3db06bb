#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the MoE block in JAX: waybill.jax beside ways to write it in JAX, forward and forward + backward, jitted, and the host time of each op.

  python3 bench/peers/jax_moe.py [--shape small|demo] [--platform cpu|cuda] [--devices N] [--seconds S] [--json FILE] [--host-only]
      [--load W0] [--only TEXT]

Stacks, same weights and routes: "waybill moe_block"; "waybill ops" (router, permute or dispatch, ragged_dot, combine); "ragged_dot" (rows sorted by expert,
XLA's default lowering of jax.lax.ragged_dot); "dense loop" (every expert on every token, times its weight). With --devices N > 1 the tokens and experts
are spread over a mesh axis: ours, and "all_to_all": pairs packed by device into equal buffers of twice the mean load, jax.lax.all_to_all,
ragged_dot, all_to_all back. That one drops what passes its buffers; the check fails then, so that only dropless runs are timed.
Each is checked against the dense loop, values and gradients, before anything is timed. Stacks take turns; medians and p90.

--platform cuda: bfloat16, logits in float32 in every stack, checked against the dense loop in float32; "waybill ops" sorts by JAX and multiplies by
grouped_matmul. A time ends when the device has finished.

--only TEXT: the stacks with TEXT in their name, and the ratio to the first of them; each is checked all the same.

--load W0 to W9: logits whose largest are the load's ids (the gate is a unit matrix, x starts with the logits; loads.py), on one device.

Host time of an op: a jitted program with the op on one row, minus a jitted program with the same arguments and results and no op, and minus the same work
called in the library directly where that is more than one matmul; medians of 1,000 calls.
"""

import argparse
import functools
import json
import platform
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import loads

START = time.perf_counter()
SHAPES = {"small": (1024, 256, 32, 4, 256), "demo": (1024, 128, 16, 2, 128), "mixtral-8th": (512, 512, 8, 2, 1792),
          "qwen3-30b": (8192, 2048, 128, 8, 768)}  # T, H, E, K, F  # fmt: skip


def route(x, gate, K):
    """Softmax over all, then the K largest, renormalised."""
    logits = jnp.matmul(x.astype(jnp.float32), gate.astype(jnp.float32).T, precision="highest")
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits), K)
    return ids.astype(jnp.int32), (weights / weights.sum(-1, keepdims=True)).astype(x.dtype)


def swiglu(h):
    gate, up = jnp.split(h, 2, axis=-1)
    return jax.nn.silu(gate) * up


def dense_loop(x, params, K):
    ids, weights = route(x, params["gate"], K)

    def add(out, expert):
        number, w1, w2 = expert
        share = jnp.where(ids == number, weights, 0).sum(-1, keepdims=True)
        return out + share * (swiglu(x @ w1.T) @ w2.T), None

    return jax.lax.scan(add, jnp.zeros_like(x), (jnp.arange(len(params["w1"])), params["w1"], params["w2"]))[0]


def experts_by_ragged_dot(rows, sizes, params):
    h = swiglu(jax.lax.ragged_dot(rows, params["w1"].swapaxes(1, 2), sizes))
    return jax.lax.ragged_dot(h, params["w2"].swapaxes(1, 2), sizes)


def ragged_dot_block(x, params, K):
    ids, weights = route(x, params["gate"], K)
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.bincount(ids.reshape(-1), length=len(params["w1"])).astype(jnp.int32)
    y = experts_by_ragged_dot(x[order // K], sizes, params) * weights.reshape(-1)[order, None]
    return jnp.zeros_like(x).at[order // K].add(y)


def all_to_all_block(x, params, K, devices):
    """Equal buffers of twice the mean load per pair of devices."""
    ids, weights = route(x, params["gate"], K)
    L, T = len(params["w1"]), len(x)
    capacity = 2 * T * K // devices
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    home = flat[order] // L
    place = jnp.arange(T * K) - jnp.searchsorted(home, home)  # among the pairs of its device
    slot = jnp.where(place < capacity, home * capacity + place, devices * capacity)
    send = jnp.zeros((devices * capacity, x.shape[1])).at[slot].set(x[order // K], mode="drop")
    local = jnp.full(devices * capacity, L, jnp.int32).at[slot].set(flat[order] % L, mode="drop")
    exchange = functools.partial(jax.lax.all_to_all, axis_name="ep", split_axis=0, concat_axis=0, tiled=True)
    rows, expert = exchange(send), exchange(local)
    inner = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=L).astype(jnp.int32)  # empty places come last, behind all groups
    y = jnp.zeros_like(rows).at[inner].set(experts_by_ragged_dot(rows[inner], sizes, params))
    back = exchange(y).at[slot].get(mode="fill", fill_value=0)
    return jnp.zeros_like(x).at[order // K].add(back * weights.reshape(-1)[order, None])


def waybill_stacks(config, axis_name):
    import waybill.jax as wbj

    def block(x, params, K):
        return wbj.moe_block(x, params, config, axis_name=axis_name)[0]

    def ops(x, params, K):
        routes = wbj.router(x @ params["gate"].T, config.router)
        place = {"E": config.router.E, "axis_name": axis_name}
        slots = wbj.dispatch(x, routes.ids, routes.weights, **place)
        h = swiglu(wbj.grouped_matmul(slots.rows, params["w1"], slots.group_sizes, layout="LNC"))
        y = wbj.grouped_matmul(h, params["w2"], slots.group_sizes, layout="LNC")
        return wbj.combine(y, routes.ids, routes.weights, **place)

    def sorted_ops(x, params, K):
        routes = wbj.router(jnp.matmul(x.astype(jnp.float32), params["gate"].astype(jnp.float32).T, precision="highest"), config.router)
        order = jnp.argsort(routes.ids.reshape(-1), stable=True)
        h = swiglu(wbj.grouped_matmul(x[order // K], params["w1"], routes.counts, layout="LNC"))
        y = wbj.grouped_matmul(h, params["w2"], routes.counts, layout="LNC") * routes.weights.reshape(-1)[order, None].astype(x.dtype)
        return jnp.zeros_like(x).at[order // K].add(y)

    return {"waybill moe_block": block, "waybill ops": sorted_ops if config.recipe == "bf16" else ops}


def report(what):
    print(f"jax_moe: {what}, {time.perf_counter() - START:.1f} s after the start", file=sys.stderr, flush=True)


@jax.jit
def largest_error(got, wanted):
    return jnp.abs(got.astype(jnp.float32) - wanted).max() / jnp.abs(wanted).max()


def stacks_of(shape, devices, load=None, only=""):
    import waybill.jax as wbj

    T, H, E, K, inner = SHAPES[shape]
    on_gpu = jax.default_backend() == "gpu"
    config = wbj.MoeConfig(H=H, F=inner, router=wbj.RouterConfig(E=E, K=K), recipe="bf16" if on_gpu else "fp32")
    params = wbj.init_params(jax.random.key(1), config)
    x, d_out = (jax.random.normal(jax.random.key(seed), (T * devices, H)) for seed in (2, 3))
    if load is not None:
        normal = np.random.default_rng(1).standard_normal
        wanted = loads.logits(load, T, K, E, normal)
        x = jnp.concatenate([wanted, normal((len(wanted), H - E))], 1).astype(jnp.float32)
        d_out, params["gate"] = jax.random.normal(jax.random.key(3), x.shape), jnp.eye(E, H)
    if devices == 1:
        functions = waybill_stacks(config, None) | {"ragged_dot": ragged_dot_block, "dense loop": dense_loop}
        blocks = {name: functools.partial(function, K=K) for name, function in functions.items()}
    else:
        mesh = jax.make_mesh((devices,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
        functions = waybill_stacks(config, "ep") | {"all_to_all": functools.partial(all_to_all_block, devices=devices)}
        specs = {"mesh": mesh, "in_specs": (P("ep"), wbj.param_specs(config, "ep")), "out_specs": P("ep")}
        blocks = {name: jax.shard_map(functools.partial(function, K=K), **specs) for name, function in functions.items()}

    if on_gpu:
        params, x, d_out = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x, d_out))

    def both(block):
        return jax.jit(lambda x, params: jax.value_and_grad(lambda x, params: (block(x, params) * d_out).sum(), argnums=(0, 1))(x, params))

    report("computing the reference")
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (x, params))
        reference = functools.partial(dense_loop, K=K)
        # Once and in float32: looking for its fastest kernels would take longer than it does.
        options = {"xla_gpu_autotune_level": "0"} if on_gpu else None
        compiled = [function.lower(*wide).compile(compiler_options=options) for function in (both(reference), jax.jit(reference))]
        report("running the reference")
        want = compiled[0](*wide)[1], compiled[1](*wide)
        jax.block_until_ready(want)
    del wide
    calls = {name: (jax.jit(block), both(block)) for name, block in blocks.items() if only in name}
    for name, (forward, backward) in calls.items():
        report(f"compiling and checking {name}")
        for got, wanted in zip(jax.tree.leaves((backward(x, params)[1], forward(x, params))), jax.tree.leaves(want), strict=True):
            error = float(largest_error(got, wanted))
            if not error < (3e-2 if on_gpu else 5e-4):  # float32 sums in other orders
                sys.exit(f"jax_moe: {name} differs from the dense loop by {error:.1e} of the largest value; nothing was timed")
    return calls, (x, params)


def take_turns(calls, seconds, rounds=5):
    times = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < rounds:
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - begin)
    return times


def summary(times):
    return {name: {"median_ms": 1e3 * statistics.median(values), "p90_ms": 1e3 * sorted(values)[int(0.9 * (len(values) - 1))], "calls": len(values)}
            for name, values in times.items()}  # fmt: skip


def library_time(config):
    """Microseconds of the same calls of the C ABI without XLA, for the ops that compute more than one matmul. A call through ctypes costs about 0.4 us more."""
    import ctypes as c

    import waybill
    from waybill import _abi, _core
    from waybill._library import library
    from waybill._tensor import view

    keep = []

    def see(value):
        keep.append(view(value, "array", dtypes=["float32", "int16"], shape=[None] * value.ndim))
        return keep[-1]

    ref = lambda value: c.byref(see(np.full(value, 0.1, np.float32)).struct)  # noqa: E731
    lib, x, out, dx = library(), ref((1, 8)), ref((1, 8)), ref((1, 8))
    tensors = [_core.moe_tensors({name: see(np.full(dims, 0.1, np.float32)) for name, dims in config.shapes().items()}) for _ in range(2)]
    parameters, gradients = map(c.byref, tensors)
    layer, step = _core.MoeLayer(config, waybill.single()), _core.MoeStep()
    exchange = _core.Exchange(waybill.single(), H=8, E=2, K=1, mode="captured", T_max=1)
    route = _core.route_struct(2, see(np.zeros((1, 1), np.int16)), see(np.ones((1, 1), np.float32)))
    routes, info, rows, plan = c.byref(route), _abi.DispatchInfo(struct_size=c.sizeof(_abi.DispatchInfo)), _abi.Tensor(), c.c_void_p()

    def forward():
        lib.wb_moe_forward(layer.handle, parameters, x, None, out, step.handle)

    def both():
        forward()
        lib.wb_moe_backward(layer.handle, parameters, gradients, x, out, dx, step.handle, 0.0)

    def permute():
        lib.wb_exchange_plan(exchange.handle, routes, c.byref(plan))
        lib.wb_dispatch_get_info(plan, c.byref(info))
        lib.wb_exchange_dispatch(exchange.handle, plan, x, c.byref(rows))
        lib.wb_permute(plan, c.byref(rows), out, None)
        lib.wb_dispatch_destroy(plan)

    def unpermute():
        lib.wb_exchange_plan(exchange.handle, routes, c.byref(plan))
        lib.wb_dispatch_get_info(plan, c.byref(info))
        lib.wb_unpermute_reduce(plan, x, 1, out, None)
        lib.wb_exchange_combine(exchange.handle, plan, out, dx)
        lib.wb_dispatch_destroy(plan)

    calls = {"moe_block forward": forward, "moe_block forward + backward": both, "permute": permute, "unpermute": unpermute}
    take_turns(calls, 0, 100)
    return {name: 1e6 * statistics.median(values) for name, values in take_turns(calls, 0, 1000).items()}


def host_time():
    """Microseconds that each op adds to a jitted call."""
    import waybill.jax as wbj

    config = wbj.MoeConfig(H=8, F=8, router=wbj.RouterConfig(E=2, K=1))
    params = wbj.init_params(jax.random.key(1), config)
    x, logits, ids, weights, sizes = jnp.ones((1, 8)), jnp.ones((1, 2)), jnp.zeros((1, 1), jnp.int16), jnp.ones((1, 1)), jnp.array([1, 0], jnp.int32)
    ops = {
        "router": (lambda logits: wbj.router(logits, config.router)[:3], (logits,)),
        "grouped_matmul": (lambda a, w, sizes: wbj.grouped_matmul(a, w, sizes), (x, jnp.ones((2, 8, 8)), sizes)),
        "permute": (lambda x, ids, weights: wbj.permute(x, ids, weights, E=2), (x, ids, weights)),
        "unpermute": (lambda y, ids, weights: wbj.unpermute(y, ids, weights, E=2), (x, ids, weights)),
        "quantize_mx": (wbj.quantize_mx, (jnp.ones((1, 32)),)),
        "moe_block forward": (lambda x, params: wbj.moe_block(x, params, config)[0], (x, params)),
        "moe_block forward + backward": (jax.grad(lambda x, params: wbj.moe_block(x, params, config)[0].sum(), argnums=(0, 1)), (x, params)),
    }  # fmt: skip
    calls = {}
    for name, (op, operands) in ops.items():
        shapes = jax.eval_shape(op, *operands)
        # Depends on every argument, so that none is dropped, and makes every result.
        empty = lambda *operands, shapes=shapes: jax.tree.map(  # noqa: E731
            lambda leaf: jnp.full(leaf.shape, sum(jnp.ravel(o)[0].astype(jnp.float32) for o in jax.tree.leaves(operands))).astype(leaf.dtype), shapes
        )
        calls[name], calls[name, "empty"] = functools.partial(jax.jit(op), *operands), functools.partial(jax.jit(empty), *operands)
    take_turns(calls, 0, 100)
    times = take_turns(calls, 0, 1000)
    medians = {name: 1e6 * statistics.median(values) for name, values in times.items()}
    alone = library_time(config)
    return {name: {"call_us": medians[name], "empty_us": medians[name, "empty"], "library_us": alone.get(name, 0.0),
                   "added_us": medians[name] - medians[name, "empty"] - alone.get(name, 0.0)} for name in ops}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--platform", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json")
    parser.add_argument("--host-only", action="store_true")
    parser.add_argument("--load", choices=loads.WORKLOADS)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.platform == "cuda" and (args.devices > 1 or args.host_only):
        parser.error("--platform cuda times one device; gpu_bindings.py has the host times there")
    if args.load and args.devices > 1:
        parser.error(f"--load {args.load} works on one device, --devices is {args.devices}")
    jax.config.update("jax_platforms", args.platform)
    if args.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", args.devices)
    on_gpu = args.platform == "cuda"
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0] if str(error) else "no plugin for it"
        parser.error(f"--platform {args.platform}: JAX {jax.__version__} finds no such device ({why})")
    record = {"jax": jax.__version__, "machine": platform.processor() or platform.machine(), "devices": args.devices}
    if args.host_only:
        record["host_us"] = host_time()
        for name, values in record["host_us"].items():
            print("| {} | {call_us:.1f} | {empty_us:.1f} | {library_us:.1f} | {added_us:.1f} |".format(name, **values))
    else:
        calls, operands = stacks_of(args.shape, args.devices, args.load, args.only)
        record["load"] = args.load or "natural"
        record["shape"] = dict(zip("THEKF", SHAPES[args.shape]))
        record["forward"] = summary(take_turns({name: functools.partial(forward, *operands) for name, (forward, _) in calls.items()}, args.seconds / 3))
        record["forward_backward"] = summary(take_turns({name: functools.partial(both, *operands) for name, (_, both) in calls.items()}, args.seconds))
        where, dtype = f"{args.devices} {args.platform} device(s)", "bfloat16" if on_gpu else "float32"
        print(f"{args.shape} {record['shape']} a device, {where}, load {record['load']}, {dtype}; ms, equal results were checked first")
        ours = record["forward_backward"][next(iter(calls))]["median_ms"]
        for name in calls:
            both = record["forward_backward"][name]
            print(f"| {name} | {record['forward'][name]['median_ms']:.2f} | {both['median_ms']:.2f} | {both['p90_ms']:.2f} | {both['median_ms'] / ours:.2f} |")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
