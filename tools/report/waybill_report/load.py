# SPDX-License-Identifier: Apache-2.0
"""python -m waybill_report.load RUN [--phases N] [--output FILE]: expert load and rank imbalance of a run, by layer and training phase."""

import argparse
import pathlib
import sys

from waybill_report.figures import run_command, write_figures
from waybill_report.run import RunError, load_run


def phase_steps(run, phases):
    """(label, steps) of equal parts of the run; empty parts are left out."""
    count = len(run.steps)
    parts = [run.steps[count * i // phases : count * (i + 1) // phases] for i in range(phases)]
    return [(f"steps {part[0]['step']}-{part[-1]['step']}", part) for part in parts if part]


def summed(steps, layer, key):
    """Sum over steps of one layer's counts."""
    from waybill_report.plots import layer_rows

    rows = layer_rows(steps, layer, key)
    return [sum(column) for column in zip(*rows, strict=True)] if rows else []


def by_phase(run, phases, key, title):
    """Bars: layers x training phases, the largest load over the mean."""
    import plotly.graph_objects as go

    from waybill_report.plots import COLORS, imbalance, layer_ids, styled

    layers = layer_ids(run)
    figure = go.Figure()
    for index, (label, steps) in enumerate(phase_steps(run, phases)):
        values = [imbalance(load) if (load := summed(steps, layer, key)) else None for layer in layers]
        figure.add_bar(x=[f"layer {layer}" for layer in layers], y=values, name=label, marker_color=COLORS[index % len(COLORS)])
    return styled(figure, title, "", "max / mean")


def shares(run, phases, layer):
    """One layer's experts by load in each phase, over the mean: a flat line at 1 is balance."""
    import plotly.graph_objects as go

    from waybill_report.plots import COLORS, styled

    figure = go.Figure()
    for index, (label, steps) in enumerate(phase_steps(run, phases)):
        load = summed(steps, layer, "counts")
        if load and sum(load):
            mean = sum(load) / len(load)
            figure.add_scatter(y=[value / mean for value in load], name=label, mode="lines+markers", line={"width": 1, "color": COLORS[index % len(COLORS)]})
    return styled(figure, f"Layer {layer}: load of each expert", "expert", "load / mean", height=300)


def figures_of(run, phases):
    from waybill_report import plots

    layers = plots.layer_ids(run)
    if not layers:
        raise RunError(f"{run.folder}: no step of this run recorded expert loads")
    figures = [by_phase(run, phases, "counts", "Hottest expert over the mean, by training phase"),
               by_phase(run, phases, "rank_slots", "Busiest rank over the mean, by training phase"), plots.layer_load(run), plots.expert_load(run),
               plots.rank_imbalance(run)]  # fmt: skip
    return [figure for figure in figures if figure is not None] + [shares(run, phases, layer) for layer in layers]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="waybill_report.load", description="Plots the expert load of a run.")
    parser.add_argument("run", help="run folder")
    parser.add_argument("--phases", type=int, default=4, help="equal parts of the run to compare (default: 4)")
    parser.add_argument("--output", help="file to write (default: RUN/load.html)")
    options = parser.parse_args(arguments)

    def body():
        run = load_run(options.run)
        output = options.output or str(pathlib.Path(options.run) / "load.html")
        write_figures(f"Expert load of {run.header.get('name') or run.folder.name}", figures_of(run, max(options.phases, 1)), output)
        return output

    return run_command("load", body)


if __name__ == "__main__":
    sys.exit(main())
