#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times a torch router (scores, topk, renormalise; compact output and dense map) on the same card: the peer of bench_cuda_router.

  python3 bench/cuda/torch_router.py OUT.jsonl
"""
import json
import statistics
import sys

import torch


def compact(x, k, score):
    s = torch.sigmoid(x) if score == "sigmoid" else torch.softmax(x, -1)
    w, ids = torch.topk(s, k, dim=-1)
    return ids, w / w.sum(-1, keepdim=True) if score == "sigmoid" else w


def dense(x, k, score):
    ids, w = compact(x, k, score)
    return torch.zeros_like(x).scatter_(1, ids, w), torch.zeros_like(x, dtype=torch.bool).scatter_(1, ids, True)


def time_us(fn, iterations=10, replays=20):
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(iterations):
            fn()
    samples = []
    for _ in range(replays + 3):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        samples.append(a.elapsed_time(b) * 1000 / iterations)
    return statistics.median(samples[3:])


def main():
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        for t, e, k in ((8192, 2304, 36), (8192, 256, 8), (8192, 512, 10), (8192, 512, 22), (16384, 128, 8)):
            for score in ("softmax", "sigmoid"):
                x = torch.randn(t, e, device="cuda")
                peer = {"torch": round(time_us(lambda: compact(x, k, score)), 2), "torch dense map": round(time_us(lambda: dense(x, k, score)), 2)}
                out.write(json.dumps({"case": f"T{t} E{e} K{k} {score}", "torch_version": torch.__version__, "peers": peer}) + "\n")
                print(t, e, k, score, peer)


if __name__ == "__main__":
    main()
