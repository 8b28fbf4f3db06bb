#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails where a folder includes one to its right, or where a CUDA or framework header is in the wrong place.

Order of the folders: core <- route <- ops <- fabric <- exchange <- moe <- baselines <- schedule <- model <- train <- capi, tools, bindings.
balance and sim use core and route only; an op uses core and route only, never another op's private header.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHAIN = ["core", "route", "ops", "fabric", "exchange", "moe", "baselines", "schedule", "model", "train"]
ALLOWED = {name: set(CHAIN[: i + 1]) for i, name in enumerate(CHAIN)}
ALLOWED["balance"] = {"core", "route", "balance"}
ALLOWED["sim"] = {"core", "route", "sim"}
for name in ("moe", "baselines", "schedule", "model", "train"):
    ALLOWED[name].add("balance")
ALLOWED["capi"] = set(CHAIN) | {"balance", "sim", "capi"}
ALLOWED["tools"] = ALLOWED["capi"] | {"tools"}

# Folder of each public header; a header that is missing here, or a name here without a header, fails the check, so the list stays true.
PUBLIC = {
    "core": "buffer_bytes build_info dtype error export log phase random status stream tensor thread_pool version workspace",
    "route": "route route_plan route_stats route_io",
    "ops": "activation gate group_rows grouped_gemm grouped_gemm_activation optimizer parameter quantize quantize_activated quantize_format "
    "quantize_gathered quantized_gemm recipe router router_weighted",
    "fabric": "fabric mpi_fabric",
    "exchange": "exchange",
    "moe": "moe",
    "baselines": "baselines",
    "model": "language_model model_math",
    "train": "checkpoint data metrics train_config trainer",
    "balance": "balance workload",
    "sim": "simulate",
    "capi": "waybill waybill_device waybill_distributed waybill_quantize",
}
FOLDER_OF_HEADER = {header: folder for folder, headers in PUBLIC.items() for header in headers.split()}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
CUDA_HEADER = re.compile(r"^(cuda|cublas|cudnn|nccl|nvtx|cub/|thrust/|cooperative_groups|mma\.h)")
FRAMEWORK_HEADER = re.compile(r"^(torch/|ATen/|c10/|xla/|jax|Python\.h|pybind11/|tensorflow/)")
SUFFIXES = {".h", ".hpp", ".cc", ".cpp", ".c", ".cu", ".cuh"}


def folder_of(path):
    """Folder (layer) a file belongs to, or None where no rule applies."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "src":
        return parts[1]
    if parts[0] == "include":
        return FOLDER_OF_HEADER.get(path.stem, "?")
    if parts[0] == "tools":
        return "tools"
    return None


def may_use_cuda(path):
    parts = path.relative_to(ROOT).parts
    return any(part.startswith("cuda") for part in parts[:-1]) or path.suffix in {".cu", ".cuh"} or parts[0] in {"bindings"} or "nccl" in path.stem


def op_of(parts):
    return parts[2] if len(parts) > 3 and parts[:2] == ("src", "ops") else None


def faults_of(path):
    text = path.read_text(encoding="utf-8")
    parts = path.relative_to(ROOT).parts
    folder = folder_of(path)
    where = "/".join(parts)
    if folder == "?":
        yield f"{where}: public header without a folder; add it to PUBLIC in scripts/check_layers.py"
        return
    for match in INCLUDE.finditer(text):
        target = match.group(2)
        line = text.count("\n", 0, match.start()) + 1
        if CUDA_HEADER.match(target) and not may_use_cuda(path):
            yield f"{where}:{line}: CUDA header {target} outside a cuda folder"
        if FRAMEWORK_HEADER.match(target) and parts[0] != "bindings":
            yield f"{where}:{line}: framework header {target} outside bindings"
        if folder is None:
            continue
        if target.startswith("waybill/"):
            used = FOLDER_OF_HEADER.get(pathlib.PurePosixPath(target).stem)
            if used is None:
                continue
        elif target.split("/")[0] in ALLOWED and "/" in target:
            used = target.split("/")[0]
            own_op, used_op = op_of(parts), target.split("/")[1] if used == "ops" else None
            if own_op and used_op and used_op != own_op:
                yield f"{where}:{line}: op {own_op} includes {target} of another op"
        else:
            continue
        if used not in ALLOWED[folder]:
            yield f"{where}:{line}: {folder} includes {target} of {used}, which is to its right"


def main():
    faults, num_files = [], 0
    for header, folder in FOLDER_OF_HEADER.items():
        if not (ROOT / "include/waybill" / f"{header}.h").is_file():
            faults.append(f"include/waybill/{header}.h: no such file; drop it from {folder} of PUBLIC in scripts/check_layers.py")
    for top in ("include", "src", "tools", "bench", "tests", "bindings"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                num_files += 1
                faults += faults_of(path)
    for fault in faults:
        print(fault)
    print(f"layers: {num_files} files, {len(faults)} faults")
    return 1 if faults or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
