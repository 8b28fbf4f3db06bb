#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes bench/results/<gpu>/<area>.json from what one scripts/gpu-check.sh run left behind.

  scripts/gpu_results.py AREA RECORDS.jsonl [PEERS.jsonl] --checks CHECKS.json [--out DIR]
Records: one JSON object a line (bench_cuda_<area>); spread, p99, floor and target may be null. Peers: {"case": ..., "peers": {...}}; matched by the
start of a record's case.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import subprocess

from cuda_sources_hash import ROOT, sources_hash


METHODS = {
    "router": "captured: one CUDA graph of 12 launches over rotating buffers (cold) or one buffer (warm), median of its replays divided by 12",
    "exchange": "captured: a CUDA graph of 8 steps over 4 sets of routes and rows on each GPU, median of 50 replays divided by 8, the slower GPU's; "
    "checked end to end before timing: identity experts on integer stamps come back exactly",
    "gemm": "burst: after 15 ms of spinning 10 calls between two events, median of 5; random data, one set of buffers; TFLOP/s count valid rows; "
    "targets and floors of operations are scaled to the dense rate of the run; peers are torch's, timed the same way in the same session, and beside each "
    "this library's own product in turns with it",
    "fp8": "burst, as gemm; operands quantised before the clock starts (1 x 128, 128 x 128, 128 x 1, scales powers of two); targets and floors of "
    "operations are scaled to the dense E4M3 rate of the run; peers are torch's row-wise scaled products, timed the same way in the same "
    "session; quantized_*: MXFP8 and NVFP4 with their dequantisation, floor the bf16 product of the same run, target 0.90 of its rate",
    "moe": "one layer, forward + backward in bf16, on the ranks and GPUs of each row (virtual ranks share a GPU: no link is used); "
    "every stack's output and gradients are compared before it is timed (sparse with a dense "
    "loop in double on a token of each rank, the others with sparse, torch with a dense fp32 layer); behind a barrier of the GPUs, the slower GPU's "
    "time, median; "
    "captured: one graph a GPU and step; eager: a host thread (torch: a process) a GPU; TFLOP/s per GPU = 18 x routes / GPUs x H x F / time; memory with x, "
    "d_out, out and dx, without weights and their gradients; exchange: plan, dispatch and combine (torch: NCCL kernels), waits for the peer included",
    "quantize": "burst: after 15 ms of spinning 20 calls between two events, median of 5, over rotating buffers larger than the L2; floor: bytes over the "
    "rate of a plain device copy of the same shape in the same run; target: 0.85 of that rate",
}


def smi(query):
    try:
        out = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True)
        return out.stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def num_gpus():
    try:
        return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines())
    except (OSError, subprocess.CalledProcessError):
        return 1


def commit():
    if os.environ.get("WAYBILL_COMMIT"):  # where the tree travels without its history
        return os.environ["WAYBILL_COMMIT"]
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("area")
    parser.add_argument("records")
    parser.add_argument("peers", nargs="?")
    parser.add_argument("--checks")
    parser.add_argument("--out", default=str(ROOT / "bench/results"))
    args = parser.parse_args()
    records = lines(args.records)
    torch = next((r["torch_version"] for r in records if "torch_version" in r), "")
    for peer in lines(args.peers) if args.peers else []:
        torch = peer.get("torch_version", torch)
        for record in records:
            # The peer computes fp32 logits' ids and weights; variants with bias or groups have no counterpart.
            if (record["op"], record["case"]) == ((peer["op"], peer["case"]) if "op" in peer else ("router_fwd", peer["case"] + " f32")):
                record["peers"] = peer["peers"]
    gpu = smi("name") or "unknown GPU"
    count = num_gpus() if args.area in ("exchange", "moe") else 1  # the other areas use one
    gpu = f"{count}x {gpu}" if count > 1 else gpu
    cuda = re.search(r"release ([\d.]+)", subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout or "")
    header = {
        "area": args.area,
        "commit": commit(),
        "cuda_sources": sources_hash(args.area),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": gpu,
        "driver": smi("driver_version"),
        "cuda": cuda.group(1) if cuda else "",
        "torch": torch,  # of the peers; empty: no peer ran
        "clocks": {"sm_mhz": smi("clocks.sm"), "memory_mhz": smi("clocks.mem"), "sm_max_mhz": smi("clocks.max.sm")},
        "method": METHODS.get(args.area, METHODS["router"]),
        "checks": json.loads(pathlib.Path(args.checks).read_text(encoding="utf-8")) if args.checks else {},
    }
    folder = pathlib.Path(args.out) / re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{args.area}.json"
    body = ",\n".join("  " + json.dumps(r) for r in records)
    path.write_text(json.dumps({"header": header}, indent=1)[:-2] + ',\n "records": [\n' + body + "\n ]\n}\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
