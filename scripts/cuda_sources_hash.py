#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hash of the sources that a GPU result depends on: CUDA code of src, and its tests and benchmarks. Prints it, or per area.

  scripts/cuda_sources_hash.py [area]     area: router, fabric, ... (default: everything)
"""
import hashlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What a result of the area is made from. core/cuda and the shared scalar code belong to every area.
SHARED = ("src/core/cuda", "src/core/scalar_math.h", "bench/cuda/timing.h")
AREAS = {
    "router": ("src/ops/router/cuda", "bench/cuda/router_bench.cc"),
    "fabric": ("src/fabric/cuda_local",),
}


def files(paths):
    for path in paths:
        full = ROOT / path
        if full.is_dir():
            yield from (p for p in full.rglob("*") if p.suffix in {".h", ".cc", ".cu", ".cuh"})
        elif full.exists():
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
