# SPDX-License-Identifier: Apache-2.0
"""python -m waybill_report.moe_bench RECORDS.json [--output FILE]: plots of `waybill bench moe --json RECORDS.json`, or of the module
benchmark on GPUs (bench/results/<gpu>/moe.json, or what bench_cuda_moe wrote)."""

import argparse
import json
import pathlib
import sys

from waybill_report import moe_module
from waybill_report.figures import run_command, write_figures
from waybill_report.run import RunError

BYTES = ["payload", "combined", "weights", "ids", "counts"]
PHASES = ["gate", "router", "plan", "dispatch", "expert_gemm", "activation", "combine"]
COUNTS = ["slots visited", "scores visited", "rows computed"]


def load_records(path):
    """{(is ablation, stack): {metric: value}} in the order of the file, and the file's case and load."""
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        records = [record for record in data["records"] if record["op"] == "moe layer"]
        if not records:
            raise RunError(f"{path}: no record of the MoE benchmark")
        return by_stack(records)
    except KeyError as error:
        raise RunError(f"{path}: not a file of benchmark records ({error} is missing)") from None
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise RunError(f"{path}: not a file of benchmark records ({error})") from None


def by_stack(records):
    stacks = {}
    for record in records:
        name, _, passes = record["variant"].partition(": ")
        is_ablation = name.startswith("ablation ")
        values = stacks.setdefault((is_ablation, name.removeprefix("ablation ")), {})
        if record["metric"] != "time":
            values[record["metric"]] = record["value"]
        else:
            values[passes] = record["value"] / 1e3
            values[f"{passes} p90"] = record["p90"] / 1e3
    first = records[0]
    return stacks, f"{first['case']}, load {first['load']}, {'checked' if first['checked'] else 'NOT CHECKED'}"


def times(stacks):
    import plotly.graph_objects as go

    from waybill_report.plots import styled

    figure = go.Figure()
    for passes, color in (("forward", "#72B7B2"), ("forward + backward", "#4C78A8")):
        y = [values.get(passes, 0) for values in stacks.values()]
        above = [max(values.get(f"{passes} p90", 0) - values.get(passes, 0), 0) for values in stacks.values()]
        figure.add_bar(x=list(stacks), y=y, name=passes, marker_color=color, error_y={"array": above, "arrayminus": [0] * len(above)})
    return styled(figure, "Time, median and p90", "", "ms")


def stacked(stacks, names, prefix, title, unit, scale):
    import plotly.graph_objects as go

    from waybill_report.plots import COLORS, styled

    figure = go.Figure()
    for index, name in enumerate(names):
        figure.add_bar(x=list(stacks), y=[values.get(prefix + name, 0) * scale for values in stacks.values()], name=name, marker_color=COLORS[index])
    figure.update_layout(barmode="stack")
    return styled(figure, title, "", unit)


def counts(stacks):
    import plotly.graph_objects as go

    from waybill_report.plots import COLORS, styled

    figure = go.Figure()
    for index, name in enumerate(COUNTS):
        figure.add_bar(x=list(stacks), y=[values.get(name, 0) for values in stacks.values()], name=name, marker_color=COLORS[index])
    figure.update_yaxes(type="log")
    return styled(figure, "Pairs of row and expert looked at, scores of the top-k, rows of the expert matmuls (log scale)", "", "count")


def figures_of(path):
    records, case = load_records(path)
    figures = []
    for is_ablation in (False, True):
        stacks = {name: values for (ablation, name), values in records.items() if ablation == is_ablation}
        if not stacks:
            continue
        made = [times(stacks), stacked(stacks, PHASES, "phase ", "Time per phase, mean over ranks", "ms", 1),
                stacked(stacks, BYTES, "bytes ", "Bytes between ranks by kind, forward and backward", "MB", 1e-6), counts(stacks)]  # fmt: skip
        for figure in made:
            figure.update_layout(title_text=("Ablation, one change at a time: " if is_ablation else "All stacks: ") + figure.layout.title.text)
        figures += made
    return figures, case


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="waybill_report.moe_bench", description="Plots the records of waybill bench moe.")
    parser.add_argument("records", help="file written by waybill bench moe --json")
    parser.add_argument("--output", help="file to write (default: RECORDS with .html)")
    options = parser.parse_args(arguments)
    output = options.output or str(pathlib.Path(options.records).with_suffix(".html"))

    def body():
        if moe_module.is_module_file(options.records):
            write_figures("MoE layer on GPUs, forward and backward", moe_module.figures_of(options.records), output)
            return output
        figures, case = figures_of(options.records)
        write_figures(f"waybill bench moe: {case}", figures, output)
        return output

    return run_command("moe_bench", body)


if __name__ == "__main__":
    sys.exit(main())
