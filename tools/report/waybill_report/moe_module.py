# SPDX-License-Identifier: Apache-2.0
"""Plots of the module benchmark on GPUs (bench_cuda_moe, bench/peers/torch_moe_ep.py): bench/results/<gpu>/moe.json or the lines that a program wrote."""

import json
import pathlib

from waybill_report.run import RunError

OP = "moe fwd+bwd"
PARTS = ["gate", "router", "plan", "dispatch", "expert_gemm", "combine", "exchange", "gemm", "other"]  # the last four: PyTorch's kernels by name


def is_module_file(path):
    return f'"{OP}"' in pathlib.Path(path).read_text(encoding="utf-8", errors="replace")


def load_cases(path):
    """{(case, load): its rows} in the order of the file."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    try:
        rows = json.loads(text)["records"] if '"records"' in text else [json.loads(line) for line in text.splitlines() if line.strip()]
        cases = {}
        for row in rows:
            if row["op"] == OP:
                kept = {name: row[name] for name in ("variant", "value", "spread", "tflops", "peak_bytes", "shares")}
                cases.setdefault((row["case"], row["load"]), []).append(kept)
        return cases
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise RunError(f"{path}: not a file of benchmark records ({error!r})") from None


def figures_of(path):
    import plotly.graph_objects as go

    from waybill_report.plots import COLORS, styled

    figures = []
    for (case, load), rows in load_cases(path).items():
        names, where = [row["variant"] for row in rows], f"{case}, load {load}"
        rates = go.Figure()
        rates.add_bar(x=names, y=[row["tflops"] for row in rows], marker_color=COLORS[0], name="TFLOP/s per GPU",
                      error_y={"array": [row["tflops"] * row["spread"] / row["value"] / 2 for row in rows]})  # fmt: skip
        figures.append(styled(rates, f"{where}: expert matmuls of valid rows, half of p90 - p10 as error", "", "TFLOP/s per GPU", 460))
        parts = go.Figure()
        for index, part in enumerate(PARTS):
            if any(part in row["shares"] for row in rows):
                parts.add_bar(x=names, y=[row["shares"].get(part, 0) * row["value"] / 1e3 for row in rows], name=part, marker_color=COLORS[index])
        parts.update_layout(barmode="stack")
        figures.append(styled(parts, f"{where}: shares of kernel time in the step (PyTorch: exchange, gemm, other)", "", "ms", 460))
        memory = go.Figure()
        memory.add_bar(x=names, y=[row["peak_bytes"] / 2**30 for row in rows], marker_color=COLORS[3], name="GiB")
        figures.append(styled(memory, f"{where}: memory without weights and their gradients", "", "GiB", 460))
    return figures
