# SPDX-License-Identifier: Apache-2.0
"""python -m waybill_report.compare RUN... [--output FILE.html] [--data FILE.json] [--svg FILE.svg]: loss curves of runs side by side.

RUN is a run folder, or NAME=FOLDER, or one data file that an earlier call wrote. The table goes to standard output in Markdown.
"""

import argparse
import html
import json
import math
import pathlib
import sys

from waybill_report.figures import run_command, write_figures
from waybill_report.run import RunError, load_run

CHUNK = 10  # steps whose training losses are averaged into one point
COLORS = ["#222222", "#4C78A8", "#F58518", "#54A24B", "#E45756", "#B279A2", "#72B7B2", "#9D755D"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 64, 20, 24, 46
FONT = 'font-family="DejaVu Sans, Arial, sans-serif"'


def recipe_of(run):
    names = dict.fromkeys(layer.get("recipe") for layer in run.header.get("layers", []) if isinstance(layer, dict))
    return ", ".join(name for name in names if name) or "fp32"


def curve_of(argument):
    """One run as plain data: points of the training loss, held-out losses, what the table needs."""
    name, _, folder = argument.rpartition("=")
    run = load_run(folder)
    points = []
    for begin in range(0, len(run.steps), CHUNK):
        losses = [step["loss"] for step in run.steps[begin:begin + CHUNK] if step["loss"] is not None]
        if losses:
            points.append([run.steps[min(begin + CHUNK, len(run.steps)) - 1]["step"], round(sum(losses) / len(losses), 5)])
    ends = [record["loss"] for record in run.evals if record["loss"] is not None]
    return {"name": name or recipe_of(run), "recipe": recipe_of(run), "steps": run.steps[-1]["step"], "train": points,
            "held_out": [[record["step"], record["loss"]] for record in run.evals],
            "final_held_out": (run.end or {}).get("loss") or (ends[-1] if ends else None),
            "skipped": sum(1 for step in run.steps if step.get("valid") is False),
            "bigram_entropy": run.header.get("bigram_entropy"), "version": run.header.get("version"), "seed": run.header.get("seed")}  # fmt: skip


def read_data(path):
    try:
        curves = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["runs"]
        if not curves or not all(isinstance(curve["name"], str) and curve["train"] for curve in curves):
            raise RunError(f"{path}: no run in it")
        return curves
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise RunError(f"{path}: not a data file of this command ({error})") from None


def load_curves(arguments):
    if len(arguments) == 1 and arguments[0].endswith(".json"):
        return read_data(arguments[0])
    curves = [curve_of(argument) for argument in arguments]
    names = [curve["name"] for curve in curves]
    if len(set(names)) < len(names):
        raise RunError(f"two runs have one name ({', '.join(names)}): give them as NAME=FOLDER")
    return curves


def table(curves):
    first = curves[0]
    lines = ["| run | steps | training loss, last 50 steps | held-out loss | against " + first["name"] + " | skipped steps |", "|---|---|---|---|---|---|"]
    for curve in curves:
        last = [loss for step, loss in curve["train"] if step > curve["steps"] - 50]
        held, base = curve["final_held_out"], first["final_held_out"]
        difference = f"{held - base:+.4f}" if held is not None and base is not None and curve is not first else "-"
        shown = f"{held:.4f}" if held is not None else "-"
        lines.append(f"| {curve['name']} | {curve['steps']} | {sum(last) / len(last):.4f} | {shown} | {difference} | {curve['skipped']} |")
    return "\n".join(lines)


def plotly_figures(curves):
    import plotly.graph_objects as go

    from waybill_report.plots import styled

    loss, gap = go.Figure(), go.Figure()
    base = dict(map(tuple, curves[0]["train"]))
    for index, curve in enumerate(curves):
        color = COLORS[index % len(COLORS)]
        x, y = zip(*curve["train"], strict=True)
        loss.add_scatter(x=x, y=y, name=curve["name"], line={"color": color, "width": 1.6})
        if curve["held_out"]:
            steps, losses = zip(*curve["held_out"], strict=True)
            loss.add_scatter(x=steps, y=losses, name=f"{curve['name']} held out", mode="markers", marker={"color": color, "size": 8, "symbol": "diamond-open"})
        if index > 0:
            both = [(step, value - base[step]) for step, value in curve["train"] if step in base]
            gap.add_scatter(x=[step for step, _ in both], y=[value for _, value in both], name=curve["name"], line={"color": color, "width": 1.6})
    return [styled(loss, f"Training loss, mean of {CHUNK} steps, and held-out loss", "step", "nats a token", 460),
            styled(gap, f"Training loss minus that of {curves[0]['name']}", "step", "nats a token")]  # fmt: skip


def ticks(low, high):
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(step * factor for factor in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (step * factor) <= 8)
    return [round(i * step, 6) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def svg(curves):
    """A static picture for documents: training losses, held-out losses as circles."""
    points = [point for curve in curves for point in curve["train"]]
    right, low = max(step for step, _ in points), min(loss for _, loss in points)
    high = sorted(loss for _, loss in points)[int(len(points) * 0.98)]  # the first steps would flatten the rest
    low, high = low - 0.03 * (high - low), high + 0.02 * (high - low)

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / right

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - min(loss, high)) / (high - low)

    def text(px, py, content, anchor="middle", size=12):
        return f'<text x="{px:.1f}" y="{py:.1f}" {FONT} font-size="{size}" fill="#333" text-anchor="{anchor}">{html.escape(content)}</text>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']  # fmt: skip
    for tick in ticks(low, high):
        line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e3e3e3"/>'
        parts.append(line + text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    for tick in ticks(0, right):
        parts.append(text(x(tick), HEIGHT - BOTTOM + 18, f"{tick:g}"))
    legend = WIDTH - max(150, 50 + 7 * max(len(curve["name"]) for curve in curves))  # about 7 units a letter
    title = f"loss, nats a token (lines: training, mean of {CHUNK} steps; circles: held out)"
    parts.append(text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 8, "step") + text(LEFT, 15, title, "start"))
    for index, curve in enumerate(curves):
        color = COLORS[index % len(COLORS)]
        line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve["train"])
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        held_out = [(step, loss) for step, loss in curve["held_out"] if loss is not None]
        parts += [f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4" fill="none" stroke="{color}" stroke-width="1.5"/>' for step, loss in held_out]
        at = TOP + 22 + 18 * index
        key = f'<line x1="{legend}" x2="{legend + 30}" y1="{at}" y2="{at}" stroke="{color}" stroke-width="2.5"/>'
        parts.append(key + text(legend + 38, at + 4, curve["name"], "start"))
    return "\n".join(parts + ["</svg>", ""])


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="waybill_report.compare", description="Loss curves of runs side by side.")
    parser.add_argument("runs", nargs="+", help="run folders, NAME=FOLDER, or one data file of an earlier call")
    parser.add_argument("--output", help="page to write (HTML, plotly inside)")
    parser.add_argument("--data", help="the curves as JSON")
    parser.add_argument("--svg", help="a static picture")
    options = parser.parse_args(arguments)

    def body():
        from waybill_report.__main__ import write_atomically

        curves = load_curves(options.runs)
        print(table(curves))
        written = []
        if options.data:
            lines = ",\n".join("  " + json.dumps(curve) for curve in curves)
            write_atomically(pathlib.Path(options.data), f'{{"runs": [\n{lines}\n]}}\n')
            written.append(options.data)
        if options.svg:
            write_atomically(pathlib.Path(options.svg), svg(curves))
            written.append(options.svg)
        if options.output:
            write_figures("Runs side by side: " + ", ".join(curve["name"] for curve in curves), plotly_figures(curves), options.output)
            written.append(options.output)
        return ", ".join(written) or f"{len(curves)} runs"

    return run_command("compare", body)


if __name__ == "__main__":
    sys.exit(main())
