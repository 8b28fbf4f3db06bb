#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much of a dispatch or combine a start/done pair hides behind independent work, in JAX on a GPU.

  python3 bench/peers/jax_pairs.py [--shape T,H,E,K] [--work N] [--repeat R] [--calls C] [--rounds N] [--limit S] [--trace FOLDER] [--json FILE]
      [--nodes PROCESS,PROCESSES,PORT] [--free]

Four programs on the same operands: "work" (R bf16 matmuls in a row, [T, H] x [H, N] and back), "whole" (dispatch or combine), "in order" (the whole call, then
the work), "pair" (start, the work, done; held in this order by waybill.jax.overlap). Their results are compared to the bit first. One call and 1 + C calls
are timed on an idle device, a C-th of the difference, median of the rounds behind the first; programs take turns. hidden = in order - pair.

--trace: one run of "pair" under jax.profiler; kernels of each stream and how long ours ran beside the work's.
--nodes: this process is one of several that share GPU 0 and are nodes of their own to NCCL; rows travel over sockets, at about 1 GB/s, so the defaults are
smaller there. Start all of them.
--free: without overlap() in "pair": XLA's scheduler decides what runs between start and done.
--limit: after so many seconds the stacks of all threads are written and the process ends.
"""

import argparse
import contextlib
import faulthandler
import glob
import json
import os
import statistics
import sys
import time


def programs(jax, wbj, args, place):
    T, H, E, K = args.shape
    jnp = jax.numpy
    barrier = jax.lax.optimization_barrier

    def work(x, w):
        for number in range(args.repeat):
            x = jnp.matmul(x, w if number % 2 == 0 else w.T)
        return x

    def pair(pending, done, w, x):
        pending, y = (pending, work(x, w)) if args.free else wbj.overlap(pending, work, x, w)
        return done(pending), y

    def whole_dispatch(x, ids, weights, w):
        return wbj.dispatch(x, ids, weights, E=E, **place)

    def dispatch_in_order(x, ids, weights, w):
        slots = wbj.dispatch(x, ids, weights, E=E, **place)
        x, valid = barrier((x, slots.valid))
        return slots._replace(valid=valid), work(x, w)

    def dispatch_pair(x, ids, weights, w):
        return pair(wbj.dispatch_start(x, ids, weights, E=E, **place), wbj.dispatch_done, w, x)

    def whole_combine(x, ids, weights, w, y):
        return wbj.combine(y, ids, weights, E=E, **place)

    def combine_in_order(x, ids, weights, w, y):
        out = wbj.combine(y, ids, weights, E=E, **place)
        x, out = barrier((x, out))
        return out, work(x, w)

    def combine_pair(x, ids, weights, w, y):
        return pair(wbj.combine_start(y, ids, weights, E=E, **place), wbj.combine_done, w, x)

    return {"work": lambda x, ids, weights, w: work(x, w), "dispatch whole": whole_dispatch, "dispatch in order": dispatch_in_order,
            "dispatch pair": dispatch_pair}, {"combine whole": whole_combine, "combine in order": combine_in_order, "combine pair": combine_pair}  # fmt: skip


def intervals(folder, jax):
    """{stream: [(name, begin, end)]} of the device's kernels in a trace, microseconds."""
    (path,) = sorted(glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True))[-1:]
    found = {}
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            events = [(event.name, event.start_ns / 1e3, (event.start_ns + event.duration_ns) / 1e3) for event in line.events]
            if "Stream" in line.name and events:
                found[line.name] = events
    return found


def show_trace(folder, jax):
    streams = intervals(folder, jax)
    base = min(begin for events in streams.values() for _, begin, _ in events)
    for name, events in streams.items():
        print(f"{name}: " + "; ".join(f"{what[:48]} {begin - base:.0f} to {end - base:.0f}" for what, begin, end in events[:12]))
    main = max(streams.values(), key=lambda events: max(end - begin for _, begin, end in events))  # the stream of the longest kernel, the matmul
    work = max(((begin, end) for _, begin, end in main), key=lambda span: span[1] - span[0])
    beside = sum(max(0, min(end, work[1]) - max(begin, work[0])) for events in streams.values() if events is not main for _, begin, end in events)
    print(f"kernels of other streams ran {beside:.0f} us beside the matmul of {work[1] - work[0]:.0f} us")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--work", type=int, default=8192)
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--trace")
    parser.add_argument("--json")
    parser.add_argument("--nodes", type=lambda text: tuple(map(int, text.split(","))))
    args = parser.parse_args()
    # A call between nodes takes milliseconds, on one GPU a quarter of one.
    for name, alone, nodes in (("shape", (8192, 4096, 32, 4), (1024, 2048, 32, 4)), ("repeat", 1, 64), ("calls", 10, 4), ("rounds", 6, 4)):
        if getattr(args, name) is None:
            setattr(args, name, nodes if args.nodes else alone)
    if args.limit:
        faulthandler.dump_traceback_later(args.limit, exit=True)
    begun = time.perf_counter()
    said = lambda text: print(f"{time.perf_counter() - begun:.1f} s: {text}", file=sys.stderr, flush=True)  # noqa: E731
    index, count = 0, 1
    if args.nodes:
        index, count, port = args.nodes
        os.environ.update(NCCL_HOSTID=f"node {index}", NCCL_SOCKET_IFNAME="lo", CUDA_MODULE_LOADING="EAGER")
    import jax
    import numpy as np

    if args.nodes:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index, local_device_ids=[0])
    if not any(device.platform == "gpu" for device in jax.devices()):
        parser.error(f"JAX {jax.__version__} finds no CUDA device")
    import waybill.jax as wbj

    T, H, E, K = args.shape
    place = {"axis_name": "ep", "hierarchy": "two_level"} if args.nodes else {}
    rng = np.random.default_rng(index)
    x, w = (jax.random.normal(jax.random.key(seed), dims, jax.numpy.bfloat16) for seed, dims in ((index, (T, H)), (9, (H, args.work))))
    w = w * (H * args.work) ** -0.25  # there and back keeps the size of x
    ids = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int16)
    weights = np.full((T, K), 1 / K, np.float32)
    of_dispatch, of_combine = programs(jax, wbj, args, place)
    mesh = jax.make_mesh((count,), ("ep",)) if args.nodes else None
    if mesh is not None:
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as Spec

        put = lambda array: jax.make_array_from_process_local_data(NamedSharding(mesh, Spec("ep")), np.asarray(array))  # noqa: E731
        x, ids, weights, w = map(put, (x, ids, weights, w))

        def wrap(function):
            def local(*arrays):
                return jax.tree.map(lambda leaf: leaf.reshape(-1) if leaf.ndim == 0 else leaf, function(*arrays))

            return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=Spec("ep"), out_specs=Spec("ep")))
    else:
        wrap = jax.jit
        x, ids, weights, w = map(jax.numpy.asarray, (x, ids, weights, w))
    calls = {name: (wrap(function), (x, ids, weights, w)) for name, function in of_dispatch.items()}
    said("operands")
    slots = calls["dispatch whole"][0](x, ids, weights, w)
    calls |= {name: (wrap(function), (x, ids, weights, w, slots.rows)) for name, function in of_combine.items()}

    def bits(tree):
        return [np.asarray(leaf.addressable_shards[0].data).tobytes() for leaf in jax.tree.leaves(tree)]

    for op in ("dispatch", "combine"):
        results = [bits(calls[f"{op} {kind}"][0](*calls[f"{op} {kind}"][1])) for kind in ("in order", "pair")]
        assert results[0] == results[1], f"{op}: the pair's results are not those of the whole call"
        said(f"{op}: equal bits")

    def seconds(call, operands, number):
        begin = time.perf_counter()
        for _ in range(number):
            out = call(*operands)
        jax.block_until_ready(out)
        return time.perf_counter() - begin

    samples = {name: [] for name in calls}
    for number in range(args.rounds):
        for name, (call, operands) in calls.items():
            seconds(call, operands, 1)
            samples[name].append((seconds(call, operands, 1 + args.calls) - seconds(call, operands, 1)) / args.calls * 1e6)
        said(f"round {number}: " + ", ".join(f"{name} {values[-1]:.0f} us" for name, values in samples.items()))
    us = {name: statistics.median(values[1:]) for name, values in samples.items()}
    if index == 0:
        print(f"T, H, E, K = {args.shape}, work {args.repeat} x [{T}, {H}] x [{H}, {args.work}], {count} process(es); us a call")
        for op in ("dispatch", "combine"):
            hidden = us[f"{op} in order"] - us[f"{op} pair"]
            share = hidden / min(us["work"], us[f"{op} whole"])
            print(f"| {op} | work {us['work']:.0f} | whole {us[f'{op} whole']:.0f} | in order {us[f'{op} in order']:.0f} | pair {us[f'{op} pair']:.0f} | "
                  f"hidden {hidden:.0f} | {hidden / us[f'{op} whole']:.2f} of the call | {share:.2f} of the shorter |", flush=True)  # fmt: skip
    if args.trace:
        for op in ("dispatch", "combine"):
            folder = os.path.join(args.trace, op)
            call, operands = calls[f"{op} pair"]
            with jax.profiler.trace(folder) if index == 0 else contextlib.nullcontext():  # the other processes take part
                jax.block_until_ready(call(*operands))
            if index > 0:
                continue
            try:
                show_trace(folder, jax)
            except (ValueError, AttributeError, KeyError) as error:
                print(f"the trace of {op} was not read: {error}")
    if args.json and index == 0:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"shape": args.shape, "work": args.work, "repeat": args.repeat, "processes": count, "us": us}, file, indent=1)
    if args.nodes:
        os._exit(0)


if __name__ == "__main__":
    main()
