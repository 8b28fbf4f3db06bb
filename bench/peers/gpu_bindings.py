#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""waybill.jax or waybill.torch on a GPU: the grouped matmul's rate beside the same kernels called from C++ and beside the framework's own, and the host
time of each op.

  python3 bench/peers/gpu_bindings.py jax|torch [--cpp GEMM.jsonl] [--shape L,ROWS,N,C] [--load W0] [--json FILE] [--only TEXT] [--rate-only | --host-only]
      [--cores N]

Rate: bf16, even groups or those of a load (W0 to W9, loads.py), random normal data; a sample of each result is compared with sums in float64 before
anything is timed. JAX has no events of its own: one call and eleven calls of a jitted program are timed, each on an idle device, and the tenth part
of the difference is taken, median of 5. PyTorch: as bench_cuda_gemm, 10 calls between two events after 15 ms of spinning, median of 5. --cpp: records
of `bench_cuda_gemm GEMM.jsonl --filter ...` of the same session, whose rates stand in the column C++. XLA's ragged_dot is whatever the installed XLA
lowers it to; it is timed over two calls. XLA_FLAGS chooses its other lowerings: --xla_gpu_experimental_use_ragged_dot_fusion=true,
--xla_gpu_experimental_use_ragged_dot_grouped_gemm=true.

Host time: medians of 1,000 calls with small operands. "call": until it returns. "empty": a program (JAX) or custom op (PyTorch) with the same arguments and
results that computes nothing of ours; in JAX both take turns. "library": the time inside the C functions, in place, where they queue their kernels
(libwaybill_clock.so). "added" = call - library - empty, also by the op; "skipped": the same where the C functions return at once, by the op. "C": C functions
through ctypes. Under a CUDA graph the time of a replay is divided by its 100 calls.
--cores: the process stays on so many of the cores on which a loop runs fastest (0: on all). PyTorch's block: torch_host.py.
"""

import argparse
import json
import statistics
import time

import cores
import loads

SHAPE = (32, 1024, 4096, 7168)  # groups, rows a group, N, C


def need_gpu(framework, parser):
    if framework == "torch":
        import torch

        found, version = torch.cuda.is_available(), torch.__version__
    else:
        import jax

        found, version = any(device.platform == "gpu" for device in jax.devices()), jax.__version__
    if not found:
        parser.error(f"{framework} {version} finds no CUDA device (a GPU, its driver and a build of {framework} with CUDA are needed)")


def median_us(samples):
    return 1e6 * statistics.median(samples)


def clock(call, count=1000, every=20, wait=lambda: None):
    """Medians of the time until `call` returns; the device is waited for between the samples."""
    for _ in range(100):
        call()
    wait()
    samples = []
    for i in range(count):
        begin = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begin)
        if i % every == every - 1:
            wait()
    return median_us(samples)


def counts_of(shape, load):
    return [shape[1]] * shape[0] if load == "even" else loads.counts(load, shape[0], shape[1])


def cpp_rates(path, shape, load):
    """TFLOP/s of the C++ benchmark by product."""
    if path is None:
        return {}
    case = "{}x{} N{} C{} {}".format(*shape, load)
    records = [json.loads(line) for line in open(path, encoding="utf-8")]
    names = {"gemm_fwd": "forward", "gemm_dgrad": "dgrad", "gemm_wgrad bf16": "wgrad"}
    return {names[r["op"]]: r["tflops"] for r in records if r.get("case") == case and r["op"] in names}


def table(rows, flops, cpp):
    for name, us in rows.items():
        rate = flops * (3 if "backward" in name else 1) / us * 1e-6
        product = name.split()[-1]
        beside = f"{cpp[product]:.1f} | {rate / cpp[product]:.3f}" if product in cpp and "waybill" in name else "- | -"
        print(f"| {name} | {us:.1f} | {rate:.1f} | {beside} |", flush=True)


def jax_rates(shape, load, cpp, only):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import waybill.jax as wbj

    L, rows, N, C = shape
    counts = counts_of(shape, load)
    S, keys = sum(counts), jax.random.split(jax.random.key(1), 3)
    a, w, dy = (jax.random.normal(key, dims, jnp.bfloat16) for key, dims in zip(keys, ((S, C), (L, C, N), (S, N))))
    sizes, group = jnp.array(counts, jnp.int32), np.repeat(np.arange(L), counts)

    def dgrad(dot):
        return jax.jit(lambda a, w, dy: jax.vjp(lambda a: dot(a, w, sizes), a)[1](dy)[0])

    def wgrad(dot):
        return jax.jit(lambda a, w, dy: jax.vjp(lambda w: dot(a, w, sizes), w)[1](dy)[0])

    lnc = jnp.swapaxes(w, 1, 2)
    calls = {
        "waybill ragged_dot forward": (jax.jit(lambda a, w, dy: wbj.ragged_dot(a, w, sizes)), (a, w, dy)),
        "waybill LNC forward": (jax.jit(lambda a, w, dy: wbj.grouped_matmul(a, w, sizes, layout="LNC")), (a, lnc, dy)),
        "waybill ragged_dot dgrad": (dgrad(wbj.ragged_dot), (a, w, dy)),
        "waybill ragged_dot wgrad": (wgrad(wbj.ragged_dot), (a, w, dy)),
        "XLA ragged_dot forward": (jax.jit(lambda a, w, dy: jax.lax.ragged_dot(a, w, sizes)), (a, w, dy)),
        "XLA ragged_dot dgrad": (dgrad(jax.lax.ragged_dot), (a, w, dy)),
        "XLA ragged_dot wgrad": (wgrad(jax.lax.ragged_dot), (a, w, dy)),
    }
    calls = {name: call for name, call in calls.items() if only in name}
    sample = np.random.default_rng(1).integers(0, S, 12)  # a product in float64 on the host takes a third of a second at the first shape
    for name in (name for name in calls if name.endswith("forward")):
        call, operands = calls[name]
        got = np.asarray(call(*operands)[sample], np.float64)
        want = np.stack([np.asarray(a[s], np.float64) @ np.asarray(w[group[s]], np.float64) for s in sample])
        error = abs(got - want).max() / abs(want).max()
        assert error < 1e-2, (name, error)

    def seconds(call, operands, count):
        time.sleep(0.1)  # a burst begins on a rested device, as those of the C++ benchmark do
        begin = time.perf_counter()
        for _ in range(count):
            out = call(*operands)
        out.block_until_ready()
        return time.perf_counter() - begin

    result = {}
    for name, (call, operands) in calls.items():
        more, rounds = (10, 5) if "waybill" in name else (1, 1)
        seconds(call, operands, 2)
        result[name] = 1e6 * statistics.median((seconds(call, operands, 1 + more) - seconds(call, operands, 1)) / more for _ in range(rounds))
    table(result, 2.0 * S * N * C, cpp)
    return result


def turns(calls, wait, timed, count=1000, every=10):
    """calls {"call", "empty"} take turns. Medians: each, "library" (the time in the library's functions, in place), and "added" = call - library - empty."""
    times, inside = {name: [] for name in calls}, []
    for number in range(count + 100):
        for name, call in calls.items():
            before = timed.nanoseconds
            begin = time.perf_counter()
            call()
            spent = time.perf_counter() - begin
            if number >= 100:
                times[name].append(spent)
                if name == "call":
                    inside.append((timed.nanoseconds - before) * 1e-9)
        if number % every == every - 1:
            wait()
    us = {name: median_us(values) for name, values in times.items()}
    without = median_us([spent - library for spent, library in zip(times["call"], inside)])
    return us | {"library": median_us(inside), "added": without - us["empty"]}


def jax_ops(jax, jnp, wbj):
    """{name: (function, operands, ops of ours in the program)}."""
    config = wbj.RouterConfig(E=64, K=4)
    logits, a, w = jnp.ones((32, 64)), jnp.ones((64, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16)
    sizes, x = jnp.array([30, 34], jnp.int32), jnp.ones((32, 64))
    block = wbj.MoeConfig(H=64, F=64, router=wbj.RouterConfig(E=8, K=2), recipe="bf16")
    rows, params = jnp.ones((16, 64), jnp.bfloat16), wbj.init_params(jax.random.key(1), block, dtype=jnp.bfloat16)

    def back(function, *operands):
        """The backward alone: what the forward left for it is an operand."""
        out, pull = jax.vjp(function, *operands)
        return lambda pull, d_out: pull(d_out), (pull, jnp.ones_like(out))

    def total(x, params):
        return wbj.moe_block(x, params, block)[0].astype(jnp.float32).sum()

    def chain(a, w, sizes):
        for _ in range(8):
            a = wbj.ragged_dot(a, w, sizes)
        return a

    return {
        "router": (lambda logits: wbj.router(logits, config)[:3], (logits,), 1),
        "router backward": (*back(lambda logits: wbj.router(logits, config).weights, logits), 1),
        "router forward + backward": (jax.grad(lambda logits: wbj.router(logits, config).weights.sum()), (logits,), 2),
        "grouped_matmul": (wbj.ragged_dot, (a, w, sizes), 1),
        "grouped_matmul backward": (*back(lambda a, w: wbj.ragged_dot(a, w, sizes), a, w), 2),
        "grouped_matmul, 8 in a program": (chain, (a, w, sizes), 8),
        "quantize_mx": (wbj.quantize_mx, (x,), 1),
        "moe_block forward": (lambda x, params: wbj.moe_block(x, params, block)[0], (rows, params), 1),
        "moe_block forward + backward": (jax.grad(total, argnums=(0, 1)), (rows, params), 2),
    }


def jax_host(timed, only="", rounds=2):
    import jax
    import jax.numpy as jnp
    import waybill.jax as wbj

    result = {}
    for name, (op, operands, count) in jax_ops(jax, jnp, wbj).items():
        if only not in name:
            continue
        shapes = jax.eval_shape(op, *operands)

        def empty(*operands, shapes=shapes):
            """Depends on every argument, so that none is dropped, and makes every result."""
            value = sum(jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in jax.tree.leaves(operands) if leaf.size)
            return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value).astype(leaf.dtype), shapes)

        holder = {}

        def call_of(kind, function, operands=operands, holder=holder):
            def call():
                holder[kind] = function(*operands)

            return call

        calls = {kind: call_of(kind, jax.jit(function)) for kind, function in (("call", op), ("empty", empty))}
        before = timed.calls
        calls["call"]()
        assert timed.calls > before, f"{name}: the program calls no function of the library that has a clock"
        wait = lambda holder=holder: jax.block_until_ready(holder)  # noqa: E731
        result[name] = [turns(calls, wait, timed) for _ in range(rounds)]
        timed.skip(True)
        skipped = turns(calls, wait, timed)
        timed.skip(False)
        for us in result[name]:
            us |= {"ops": count, "skipped": skipped["added"]}
            print(f"| {name} | {count} | {us['call']:.1f} | {us['empty']:.1f} | {us['library']:.1f} | {us['added']:.1f} | {us['added'] / count:.1f} | "
                  f"{us['skipped'] / count:.1f} |", flush=True)  # fmt: skip
    return result


def torch_rates(shape, load, cpp, only):
    import torch
    import waybill.torch as wbt
    from torch_grouped import time_us

    L, rows, N, C = shape
    counts = torch.tensor(counts_of(shape, load), dtype=torch.int32, device="cuda")
    S, group = int(counts.sum()), torch.repeat_interleave(torch.arange(L, device="cuda"), counts)
    a, w, dy = (torch.randn(*dims, device="cuda", dtype=torch.bfloat16) for dims in ((S, C), (L, N, C), (S, N)))
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    ops = torch.ops.waybill
    calls = {
        "waybill forward": lambda: wbt.grouped_matmul(a, w, offsets),
        "waybill dgrad": lambda: ops.grouped_matmul_dgrad(dy, w, offsets, False),
        "waybill wgrad": lambda: ops.grouped_matmul_wgrad(a, dy, w, offsets, False, False)[0],
    }
    if hasattr(torch, "_grouped_mm"):
        calls |= {
            "torch._grouped_mm forward": lambda: torch._grouped_mm(a, w.transpose(1, 2), offs=offsets[1:]),
            "torch._grouped_mm dgrad": lambda: torch._grouped_mm(dy, w, offs=offsets[1:]),
            "torch._grouped_mm wgrad": lambda: torch._grouped_mm(dy.t(), a, offs=offsets[1:]),
        }
    sample = torch.randint(0, S, (50,), device="cuda")
    calls = {name: call for name, call in calls.items() if only in name}
    for name in (name for name in calls if name.endswith("forward")):
        got, want = calls[name]()[sample].double(), torch.stack([a[s].double() @ w[group[s]].double().T for s in sample])
        assert (got - want).abs().max() < 1e-2 * want.abs().max(), name
    result = {name: time_us(call) for name, call in calls.items()}
    table(result, 2.0 * S * N * C, cpp)
    return result


def torch_host():
    import ctypes as c

    import torch
    import waybill.torch as wbt
    from waybill import _abi, _core
    from waybill._library import library
    from waybill.torch import _views

    @torch.library.custom_op("waybill_timing::empty", mutates_args=())
    def empty(a: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return a.new_empty(a.shape[0], w.shape[1])

    config = wbt.RouterConfig(E=64, K=4)
    logits = torch.randn(32, 64, device="cuda")
    a, w = torch.randn(64, 64, device="cuda").bfloat16(), torch.randn(2, 64, 64, device="cuda").bfloat16()
    offsets, y = torch.tensor([0, 30, 64], dtype=torch.int32, device="cuda"), torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
    leaf, weight = a.clone().requires_grad_(), w.clone().requires_grad_()
    views = [_views.view(t, "t") for t in (a, w, offsets, y)]
    args = _abi.GroupedGemmArgs(struct_size=c.sizeof(_abi.GroupedGemmArgs), a=views[0].struct, weights=views[1].struct, offsets=views[2].struct,
                                y=views[3].struct)  # fmt: skip
    stream = _core.cuda_stream(0, torch.cuda.current_stream().cuda_stream)
    lib, args_ref, stream_ref = library(), c.byref(args), c.byref(stream)
    calls = {
        "empty custom op": lambda: empty(a, w, offsets),
        "C: wb_grouped_gemm": lambda: lib.wb_grouped_gemm(args_ref, stream_ref),
        "C: wb_group_rows": lambda: lib.wb_group_rows(None, c.byref(views[2].struct), c.byref(views[3].struct), 64, stream_ref),
        "grouped_matmul": lambda: wbt.grouped_matmul(a, w, offsets),
        "grouped_matmul forward + backward": lambda: wbt.grouped_matmul(leaf, weight, offsets).backward(y),
        "router": lambda: wbt.router(logits, config),
    }
    result = {}
    for name, call in calls.items():
        result[name] = clock(call, wait=torch.cuda.synchronize)
        print(f"| {name} | {result[name]:.1f} |", flush=True)
    side = torch.cuda.Stream()
    for name, call in {"grouped_matmul": calls["grouped_matmul"], "router": calls["router"]}.items():
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                call()
        result[name + ", a call of a replayed graph"] = clock(graph.replay, 100, 1, torch.cuda.synchronize) / 100
        print(f"| {name}, host time of a call in a replayed graph | {result[name + ', a call of a replayed graph']:.3f} |", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["jax", "torch"])
    parser.add_argument("--cpp")
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split(","))), default=SHAPE)
    parser.add_argument("--load", default="even", choices=["even", *loads.WORKLOADS])
    parser.add_argument("--json")
    parser.add_argument("--only", default="", help="rates and, in JAX, host times of the calls with this in their name")
    parser.add_argument("--rate-only", action="store_true")
    parser.add_argument("--host-only", action="store_true")
    parser.add_argument("--cores", type=int, default=0)
    args = parser.parse_args()
    chosen, best, worst = cores.take_quiet(args.cores)
    print(f"cores {chosen}, a loop takes {best:.0f} us there and up to {worst:.0f} on others", flush=True)
    need_gpu(args.framework, parser)
    timed = None
    if args.framework == "jax" and not args.rate_only:
        import timed_library

        timed = timed_library.Timed()  # before waybill.jax
    record = {"framework": args.framework, "shape": args.shape, "load": args.load}
    if not args.host_only:
        print("{}x{} N{} C{} {} bf16: | call | us | TFLOP/s | C++ TFLOP/s | of C++ |".format(*args.shape, args.load))
        rates = {"jax": jax_rates, "torch": torch_rates}[args.framework]
        record["rate_us"] = rates(args.shape, args.load, cpp_rates(args.cpp, args.shape, args.load), args.only)
    if not args.rate_only:
        heads = {"jax": "program | ops | call | empty | library | added | an op | skipped", "torch": "op | call"}
        print(f"host time, us: | {heads[args.framework]} |")
        record["host_us"] = jax_host(timed, args.only) if args.framework == "jax" else torch_host()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
