# SPDX-License-Identifier: Apache-2.0
"""The figures. Each function takes a Run and returns a plotly figure, or None where the run did not record what it needs."""

import plotly.graph_objects as go

MAX_COLUMNS = 240  # columns of a heat map; more steps are averaged in equal chunks
PHASES = ["gate", "router", "plan", "dispatch", "expert_gemm", "activation", "combine", "shared", "attention", "dense", "embedding",
          "grad_reduce", "optimizer", "other"]  # fmt: skip
COLORS = ["#4C78A8", "#F58518", "#E45756", "#72B7B2", "#54A24B", "#EECA3B", "#B279A2", "#FF9DA6", "#9D755D", "#BAB0AC", "#1F77B4",
          "#8C6D31", "#7F7F7F", "#C7C7C7"]  # fmt: skip
SENT = ["payload", "combined", "ids", "weights", "counts"]


def styled(figure, title, x_title, y_title, height=380):
    figure.update_layout(
        title={"text": title, "x": 0, "xanchor": "left", "font": {"size": 16}},
        template="plotly_white", height=height, margin={"l": 70, "r": 20, "t": 50, "b": 50},
        xaxis_title=x_title, yaxis_title=y_title, legend={"font": {"size": 11}}, hovermode="x unified",
    )  # fmt: skip
    return figure


def chunk_bounds(count):
    """(begin, end) of at most MAX_COLUMNS equal chunks of `count` steps."""
    columns = min(count, MAX_COLUMNS)
    return [(i * count // columns, (i + 1) * count // columns) for i in range(columns)]


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def thinned(steps):
    """One step of each chunk, for stacked areas and lines of long runs."""
    return [steps[begin] for begin, _ in chunk_bounds(len(steps))]


def imbalance(values):
    """max / mean; 0 without load."""
    total = sum(values)
    return max(values) * len(values) / total if total else 0.0


def layer_ids(run):
    return sorted({layer["layer"] for step in run.steps for layer in step.get("layers", []) if layer.get("counts")})


def experts_per_row(run, layer_id):
    """Experts behind one value of `counts`: layers with very many experts are recorded in equal bins."""
    return next((layer.get("experts_per_bin", 1) for step in run.steps for layer in step.get("layers", []) if layer.get("layer") == layer_id), 1)


def layer_rows(steps, layer_id, key):
    """[step][...] values of one layer; steps that lack the layer are left out."""
    return [layer[key] for step in steps for layer in step.get("layers", []) if layer.get("layer") == layer_id and layer.get(key)]


def loss(run):
    figure = go.Figure()
    x = [step["step"] for step in run.steps]
    figure.add_scatter(x=x, y=[step["loss"] for step in run.steps], name="training loss", mode="lines", line={"color": "#4C78A8", "width": 1.3})
    if run.evals:
        figure.add_scatter(x=[e["step"] for e in run.evals], y=[e["loss"] for e in run.evals], name="held-out loss", mode="lines+markers",
                           line={"color": "#E45756", "width": 2})  # fmt: skip
    for key, label, dash in (("unigram_entropy", "unigram entropy of the text", "dash"), ("bigram_entropy", "bigram entropy of the text", "dot")):
        if run.header.get(key):
            figure.add_scatter(x=[x[0], x[-1]], y=[run.header[key]] * 2, name=f"{label} ({run.header[key]:.3f})", mode="lines",
                               line={"color": "#555555", "dash": dash, "width": 1})  # fmt: skip
    return styled(figure, "Loss", "step", "nats per token")


def phases(run):
    steps = [step for step in thinned(run.steps) if step.get("phase_ms")]
    if not steps:
        return None
    figure = go.Figure()
    names = PHASES + sorted({name for step in steps for name in step["phase_ms"]} - set(PHASES))
    for index, name in enumerate(names):
        y = [step["phase_ms"].get(name, 0) for step in steps]
        if any(y):
            figure.add_scatter(x=[step["step"] for step in steps], y=y, name=name, stackgroup="time", mode="lines",
                               line={"width": 0.3, "color": COLORS[index % len(COLORS)]})  # fmt: skip
    return styled(figure, "Time per phase (mean over ranks)", "step", "ms per step")


def speed(run):
    steps = [step for step in run.steps if step.get("tokens_per_s")]
    if not steps:
        return None
    figure = go.Figure()
    figure.add_scatter(x=[step["step"] for step in steps], y=[step["tokens_per_s"] for step in steps], name="tokens/s", mode="lines",
                       line={"color": "#54A24B", "width": 1.3})  # fmt: skip
    figure.update_yaxes(rangemode="tozero")
    return styled(figure, "Speed", "step", "tokens/s", height=300)


def expert_load(run):
    """One heat map of experts x steps for each layer, chosen by a menu. Colour: load / mean load, 1 = balanced."""
    layers = layer_ids(run)
    if not layers:
        return None
    figure = go.Figure()
    buttons = []
    for index, layer in enumerate(layers):
        steps = [step for step in run.steps if any(item.get("layer") == layer and item.get("counts") for item in step.get("layers", []))]
        rows = layer_rows(steps, layer, "counts")
        bounds = chunk_bounds(len(rows))
        num_experts = len(rows[0])
        per_row = experts_per_row(run, layer)
        z = []
        for expert in range(num_experts):
            z.append([relative_load(rows[begin:end], expert, num_experts) for begin, end in bounds])
        figure.add_heatmap(z=z, x=[steps[begin]["step"] for begin, _ in bounds], y=[expert * per_row for expert in range(num_experts)],
                           visible=index == 0, zmin=0, zmax=2, colorscale="RdBu_r", colorbar={"title": "load / mean"},
                           hovertemplate="step %{x}, expert %{y}: %{z:.2f} x mean<extra></extra>")  # fmt: skip
        buttons.append({"label": f"layer {layer}", "method": "update", "args": [{"visible": [i == index for i in range(len(layers))]}]})
    figure.update_layout(updatemenus=[{"buttons": buttons, "x": 1, "xanchor": "right", "y": 1.18, "yanchor": "top"}])
    styled(figure, "Expert load, a layer at a time", "step", "expert", height=460)
    figure.update_layout(hovermode="closest")
    return figure


def relative_load(rows, expert, num_experts):
    total = sum(sum(row) for row in rows)
    return sum(row[expert] for row in rows) * num_experts / total if total else 0.0


def layer_load(run):
    """Layers x steps: the hottest expert's load over the mean."""
    layers = layer_ids(run)
    if not layers:
        return None
    bounds = chunk_bounds(len(run.steps))
    z = [[mean(imbalance(row) for row in layer_rows(run.steps[begin:end], layer, "counts")) for begin, end in bounds] for layer in layers]
    figure = go.Figure(go.Heatmap(z=z, x=[run.steps[begin]["step"] for begin, _ in bounds], y=[f"layer {layer}" for layer in layers],
                                  colorscale="YlOrRd", zmin=1, colorbar={"title": "max / mean"},
                                  hovertemplate="step %{x}, %{y}: hottest expert %{z:.2f} x mean<extra></extra>"))  # fmt: skip
    styled(figure, "Hottest expert over layers and steps", "step", "", height=220 + 26 * len(layers))
    figure.update_layout(hovermode="closest")
    return figure


def rank_imbalance(run):
    steps = thinned(run.steps)
    figure = go.Figure()
    for layer in layer_ids(run):
        points = [(step["step"], imbalance(item["rank_slots"])) for step in steps for item in step.get("layers", [])
                  if item.get("layer") == layer and item.get("rank_slots")]  # fmt: skip
        if points:
            figure.add_scatter(x=[p[0] for p in points], y=[p[1] for p in points], name=f"layer {layer}", mode="lines", line={"width": 1.2})
    if not figure.data:
        return None
    return styled(figure, "Rank imbalance (most loaded expert-parallel rank / mean)", "step", "max / mean slots", height=320)


def sent_bytes(run):
    """Mean bytes a step between ranks: what was sent, and what a dense-map design would have sent for the same routes."""
    records = [step["bytes"] for step in run.steps if step.get("bytes")]
    if not records:
        return None
    average = {key: mean(record.get(key, 0) for record in records) for key in records[0]}
    # The rows themselves travel in both designs.
    parts = [(key, average.get(key, 0), average.get(key, 0) if key in ("payload", "combined") else 0) for key in SENT]
    parts.append(("route map [T, E]", 0, average.get("dense_route_map", 0)))
    parts.append(("full probability rows", 0, average.get("dense_probability_row", 0)))
    figure = go.Figure()
    for index, (name, compact, dense) in enumerate(parts):
        figure.add_bar(y=["compact (sent)", "dense map (model)"], x=[compact, dense], name=name, orientation="h", marker_color=COLORS[index])
    figure.update_layout(barmode="stack")
    return styled(figure, "Bytes between ranks in a mean step, all layers and ranks, forward and backward", "bytes", "", height=260)


SECTIONS = [loss, phases, layer_load, expert_load, rank_imbalance, sent_bytes, speed]
