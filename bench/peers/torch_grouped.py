#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times torch's grouped matmuls on the shapes of bench_cuda_gemm with the same method: 15 ms of spinning, then 10 calls between two events,
median of 5. torch._grouped_mm (bf16); wgrad stores bf16.

  python3 bench/peers/torch_grouped.py OUT.jsonl [--loads | --only-loads]
  python3 bench/peers/torch_grouped.py OUT.jsonl --fp8
--loads: also softmax, hot90 and zipf at two shapes, and W0 to W9 at 64x1024 N2048 C1024 (loads.py); --only-loads: nothing else.
--fp8: torch._scaled_grouped_mm (E4M3, row-wise scales, fast accumulation) instead, the peer of bench_cuda_fp8's forward. Row-wise scales are
coarser than blocks of 128: torch adds no products of blocks in fp32.
"""
import argparse
import json
import statistics

import torch

import loads

SHAPES = [
    (8, 4096, 4096, 7168), (8, 4096, 7168, 2048), (32, 1024, 4096, 7168), (128, 2048, 1536, 2048), (128, 2048, 2048, 768),
    (32, 288, 512, 1024), (32, 9216, 1024, 512), (256, 320, 1024, 2048), (256, 320, 2048, 512),
]  # fmt: skip
LOADED = [(32, 9216, 1024, 512), (32, 1024, 4096, 7168)]
WORKLOAD_SHAPE = (64, 1024, 2048, 1024)


def time_us(fn):
    fn()
    torch.cuda.synchronize()
    samples = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(30_000_000)
        begin.record()
        for _ in range(10):
            fn()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 100)
    return statistics.median(samples)


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
    offsets = torch.cumsum(counts, 0).to(torch.int32).cuda()
    s = int(offsets[-1])
    a = torch.randn(s, c, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(groups, n, c, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(s, n, device="cuda", dtype=torch.bfloat16)
    ops = {
        "gemm_fwd": lambda: torch._grouped_mm(a, w.transpose(1, 2), offs=offsets),
        "gemm_dgrad": lambda: torch._grouped_mm(dy, w, offs=offsets),
        "gemm_wgrad bf16": lambda: torch._grouped_mm(dy.t(), a, offs=offsets),
    }
    return s, {op: time_us(fn) for op, fn in ops.items()}


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


def main():
    arguments = parse()
    if arguments.fp8:
        with open(arguments.out, "w", encoding="utf-8") as out:
            for groups, rows, n, c in SHAPES:
                us = measure_fp8(groups, rows, n, c)
                record = {"op": "fp8_fwd", "case": f"{groups}x{rows} N{n} C{c} even", "torch_version": torch.__version__,
                          "peers": {"torch row-wise": round(us, 2)}}  # fmt: skip
                out.write(json.dumps(record) + "\n")
                print(f"{groups}x{rows} N{n} C{c}: {us:.1f} us {2 * groups * rows * n * c / us * 1e-6:.1f} TFLOP/s", flush=True)
        return
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    dense = 2 * 8192**3 / time_us(lambda: x @ y.t()) * 1e-6
    print(f"dense 8192^3: {dense:.1f} TFLOP/s")
    cases = [] if arguments.only_loads else [(*s, "even") for s in SHAPES]
    if arguments.only_loads or arguments.loads:
        cases += [(*s, load) for load in ("softmax", "hot90", "zipf") for s in LOADED]
        cases += [(*WORKLOAD_SHAPE, load) for load in loads.WORKLOADS]
    with open(arguments.out, "w", encoding="utf-8") as out:
        for groups, rows, n, c, load in cases:
            s, times = measure(groups, rows, n, c, load)
            flops, line = 2 * s * n * c, ""
            for op, us in times.items():
                case = f"{groups}x{rows} N{n} C{c} {load}"
                record = {"op": op, "case": case, "torch_version": torch.__version__, "peers": {"torch": round(us, 2)}, "dense": round(dense, 1)}
                out.write(json.dumps(record) + "\n")
                line += f"  {op} {us:.1f} us {flops / us * 1e-6:.1f} TFLOP/s"
            print(f"{groups}x{rows} N{n} C{c} {load}:{line}", flush=True)


if __name__ == "__main__":
    main()
