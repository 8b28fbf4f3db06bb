#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times torch's grouped matmuls on the shapes of bench_cuda_gemm with the same method: 15 ms of spinning, then 10 calls between two events,
median of 5. torch._grouped_mm (bf16); wgrad stores bf16. Where WAYBILL_LIBRARY names the library, its kernels are timed too, a burst of each in
turns, so that both meet the same clock: the record has both times.

  python3 bench/peers/torch_grouped.py OUT.jsonl [--loads | --only-loads]
  python3 bench/peers/torch_grouped.py OUT.jsonl --fp8
--loads: also softmax, hot90 and zipf at two shapes, and W0 to W9 at 64x1024 N2048 C1024 (loads.py); --only-loads: nothing else.
--fp8: torch._scaled_grouped_mm (E4M3, row-wise scales, fast accumulation) instead, the peer of bench_cuda_fp8's forward. Row-wise scales are
coarser than blocks of 128: torch adds no products of blocks in fp32.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys

import torch

import loads

SHAPES = [
    (8, 4096, 4096, 7168), (8, 4096, 7168, 2048), (32, 1024, 4096, 7168), (128, 2048, 1536, 2048), (128, 2048, 2048, 768),
    (32, 288, 512, 1024), (32, 9216, 1024, 512), (256, 320, 1024, 2048), (256, 320, 2048, 512),
]  # fmt: skip
LOADED = [(32, 9216, 1024, 512), (32, 1024, 4096, 7168)]
WORKLOAD_SHAPE = (64, 1024, 2048, 1024)


def times_us(calls):
    """Medians by name; the calls take turns, a burst of ten each."""
    samples = {name: [] for name in calls}
    for fn in calls.values():
        fn()
    torch.cuda.synchronize()
    for repetition in range(5):
        for name, fn in calls.items() if repetition % 2 == 0 else reversed(calls.items()):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(30_000_000)
            begin.record()
            for _ in range(10):
                fn()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) * 100)
    return {name: statistics.median(us) for name, us in samples.items()}


def time_us(fn):
    return times_us({"": fn})[""]


def waybill_calls(a, w, dy, offsets):
    """Our products of the same operands, by op; none where WAYBILL_LIBRARY is not set."""
    if not os.environ.get("WAYBILL_LIBRARY"):
        return {}
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings/python"))
    from waybill import _core
    from waybill.torch import _views

    y, da, dw = torch.empty_like(dy), torch.empty_like(a), torch.empty_like(w)
    tensors = {"a": a, "w": w, "dy": dy, "offsets": offsets, "y": y, "da": da, "dw": dw}
    views, stream = {name: _views.view(tensor, name) for name, tensor in tensors.items()}, _views.stream(a)

    def product(name, *operands):
        return lambda: _core.grouped_gemm(name, *(views[operand] for operand in operands), stream=stream)

    calls = {
        "gemm_fwd": product("forward", "a", "w", "offsets", "y"),
        "gemm_dgrad": product("dgrad", "da", "w", "offsets", "dy"),
        "gemm_wgrad bf16": product("wgrad", "a", "dw", "offsets", "dy"),
    }
    for call in calls.values():
        call()
    g = int((offsets[1:] - offsets[:-1]).argmax())
    rows = slice(int(offsets[g]), int(offsets[g + 1]))
    wants = ((y[rows], a[rows].float() @ w[g].float().T), (da[rows], dy[rows].float() @ w[g].float()), (dw[g], dy[rows].float().T @ a[rows].float()))
    for got, want in wants:
        assert (got.float() - want).norm() < 6e-3 * want.norm()
    return calls


def counts_of(groups, rows, load):
    """The loads of bench_cuda_gemm by shape; softmax draws other normal numbers."""
    if load in loads.WORKLOADS:
        return loads.counts(load, groups, rows)
    total = groups * rows
    if load == "even":
        return [rows] * groups
    if load == "softmax":
        share = torch.softmax(torch.randn(groups, generator=torch.Generator().manual_seed(1)), 0).tolist()
    elif load == "zipf":
        share = [1 / (i + 1) for i in range(groups)]
    elif load != "hot90":
        raise ValueError(f"unknown load {load!r} (even, softmax, hot90, zipf, W0 to W9)")
    else:
        share = [9.0 * (groups - 1)] + [1.0] * (groups - 1)
    counts = [int(s / sum(share) * total) for s in share]
    for i in range(total - sum(counts)):
        counts[i % groups] += 1
    return counts


def measure(groups, rows, n, c, load):
    counts = torch.tensor(counts_of(groups, rows, load))
    all_offsets = torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0)).to(torch.int32).cuda()
    offsets = all_offsets[1:].clone()
    s = int(offsets[-1])
    a = torch.randn(s, c, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(groups, n, c, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(s, n, device="cuda", dtype=torch.bfloat16)
    ops = {
        "gemm_fwd": lambda: torch._grouped_mm(a, w.transpose(1, 2), offs=offsets),
        "gemm_dgrad": lambda: torch._grouped_mm(dy, w, offs=offsets),
        "gemm_wgrad bf16": lambda: torch._grouped_mm(dy.t(), a, offs=offsets),
    }
    ours = waybill_calls(a, w, dy, all_offsets)
    return s, {op: times_us({"torch": fn} | ({"waybill in turns with it": ours[op]} if op in ours else {})) for op, fn in ops.items()}


def measure_fp8(groups, rows, n, c):
    offsets = (torch.arange(1, groups + 1) * rows).to(torch.int32).cuda()
    a = torch.randn(groups * rows, c, device="cuda").to(torch.float8_e4m3fn)
    w = torch.randn(groups, n, c, device="cuda").to(torch.float8_e4m3fn)
    a_scale, w_scale = torch.ones(groups * rows, device="cuda"), torch.ones(groups, n, device="cuda")
    return time_us(lambda: torch._scaled_grouped_mm(a, w.transpose(1, 2), a_scale, w_scale, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("out")
    what = parser.add_mutually_exclusive_group()
    for option in ("--loads", "--only-loads", "--fp8"):
        what.add_argument(option, action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a GPU is needed, none is here")
    return arguments


def record_fp8(out):
    for groups, rows, n, c in SHAPES:
        us = measure_fp8(groups, rows, n, c)
        record = {"op": "fp8_fwd", "case": f"{groups}x{rows} N{n} C{c} even", "torch_version": torch.__version__, "peers": {"torch row-wise": round(us, 2)}}
        out.write(json.dumps(record) + "\n")
        print(f"{groups}x{rows} N{n} C{c}: {us:.1f} us {2 * groups * rows * n * c / us * 1e-6:.1f} TFLOP/s", flush=True)


def record_bf16(out, cases):
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dense = 2 * 8192**3 / time_us(lambda: x @ y.t()) * 1e-6
    print(f"dense 8192^3: {dense:.1f} TFLOP/s")
    for groups, rows, n, c, load in cases:
        s, times = measure(groups, rows, n, c, load)
        case, flops, line = f"{groups}x{rows} N{n} C{c} {load}", 2 * s * n * c, ""
        for op, peers in times.items():
            rounded = {name: round(us, 2) for name, us in peers.items()}
            record = {"op": op, "case": case, "torch_version": torch.__version__, "peers": rounded, "dense": round(dense, 1)}
            out.write(json.dumps(record) + "\n")
            others = "".join(f", {name} {us:.1f}" for name, us in peers.items() if name != "torch")
            line += f"  {op} {peers['torch']:.1f} us {flops / peers['torch'] * 1e-6:.1f} TFLOP/s{others}"
        print(f"{case}:{line}", flush=True)


def main():
    arguments = parse()
    cases = [] if arguments.only_loads else [(*s, "even") for s in SHAPES]
    if arguments.only_loads or arguments.loads:
        cases += [(*s, load) for load in ("softmax", "hot90", "zipf") for s in LOADED]
        cases += [(*WORKLOAD_SHAPE, load) for load in loads.WORKLOADS]
    with open(arguments.out, "w", encoding="utf-8") as out:
        if arguments.fp8:
            record_fp8(out)
        else:
            record_bf16(out, cases)


if __name__ == "__main__":
    main()
