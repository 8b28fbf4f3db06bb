#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hash of the sources that a GPU result depends on: CUDA code of src with the headers and references it is held to, and the tests and
benchmarks in tests/cuda and bench/cuda. Prints it, or per area.

  scripts/cuda_sources_hash.py [area]     area: router, fabric, ... (default: everything)
"""
import hashlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What a result of the area is made from; folders or patterns. core/cuda, the shared scalar code, tests and benchmarks belong to every area.
SHARED = ("src/core/cuda", "src/core/scalar_math.h", "bench/cuda", "tests/cuda")
AREAS = {
    "router": ("src/ops/router/cuda", "src/ops/router/*.h", "src/ops/router/router_ref.cc", "include/waybill/router.h"),
    "gemm": ("src/ops/gemm/cuda", "src/ops/gemm/*.h", "src/ops/gemm/grouped_gemm*.cc", "include/waybill/grouped_gemm*.h", "src/ops/activation/cuda",
             "src/ops/activation/*.h", "include/waybill/activation.h", "bench/peers/torch_grouped.py"),
    "exchange": ("src/exchange/cuda", "src/exchange/*.h", "src/fabric/cuda_local", "src/fabric/nccl", "include/waybill/exchange.h",
                 "include/waybill/route_plan.h"),
    "fp8": ("src/ops/gemm/cuda", "src/ops/quantize/cuda", "bench/peers/torch_grouped.py"),
    "quantize": ("src/ops/quantize/cuda", "src/ops/quantize/*.cc", "src/ops/quantize/*.h", "include/waybill/quantize.h"),
    "moe": ("src/moe/cuda", "src/moe/*.h", "src/exchange/cuda", "src/fabric/cuda_local", "src/ops/gemm/cuda", "src/ops/activation/cuda", "src/ops/router/cuda",
            "bench/peers/torch_moe_ep.py", "bench/shapes/moe.toml"),
    "fabric": ("src/fabric/cuda_local",),
}


def files(paths):
    for path in paths:
        for full in ROOT.glob(path):
            if full.is_dir():
                yield from (p for p in full.rglob("*") if p.suffix in {".h", ".cc", ".cu", ".cuh", ".py"})
            else:
                yield full


def sources_hash(area=None):
    paths = SHARED + (AREAS[area] if area else tuple(p for a in AREAS.values() for p in a))
    digest = hashlib.sha256()
    for path in sorted(set(files(paths))):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(sources_hash(sys.argv[1] if len(sys.argv) > 1 else None))
