#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times torch._scaled_grouped_mm (E4M3, row-wise scales, fast accumulation) on the shapes of bench_cuda_fp8: the peer of the 8-bit forward.

  torch_fp8.py OUT.jsonl
Method "burst", as bench_cuda_fp8: the device spins about 15 ms, then 10 calls between two events, median of 5; random data. Row-wise scales
are coarser than blocks of 128: torch adds no products of blocks in fp32.
"""
import json
import statistics
import sys

import torch

SHAPES = [(8, 4096, 4096, 7168), (8, 4096, 7168, 2048), (32, 1024, 4096, 7168), (128, 2048, 1536, 2048), (128, 2048, 2048, 768), (32, 288, 512, 1024),
          (32, 9216, 1024, 512), (256, 320, 1024, 2048), (256, 320, 2048, 512)]


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


def measure(groups, rows, n, c):
    offsets = (torch.arange(1, groups + 1) * rows).to(torch.int32).cuda()
    a = torch.randn(groups * rows, c, device="cuda").to(torch.float8_e4m3fn)
    w = torch.randn(groups, n, c, device="cuda").to(torch.float8_e4m3fn)
    a_scale, w_scale = torch.ones(groups * rows, device="cuda"), torch.ones(groups, n, device="cuda")
    return time_us(lambda: torch._scaled_grouped_mm(a, w.transpose(1, 2), a_scale, w_scale, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True))


def main():
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        for groups, rows, n, c in SHAPES:
            us = measure(groups, rows, n, c)
            record = {"op": "fp8_fwd", "case": f"{groups}x{rows} N{n} C{c} even", "torch_version": torch.__version__, "peers": {"torch row-wise": round(us, 2)}}
            out.write(json.dumps(record) + "\n")
            print(f"{groups}x{rows} N{n} C{c}: {us:.1f} us {2 * groups * rows * n * c / us * 1e-6:.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
