# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/speed.svg from the MoE layer's recorded results on one GPU: ms of a step beside PyTorch's grouped layer and the dense map.
scripts/render_performance.py calls it."""

FONT = 'font-family="DejaVu Sans, Arial, sans-serif"'
WIDTH, LEFT, ROOM, BAR, GAP = 860, 300, 430, 17, 14  # LEFT: where bars begin; ROOM: length of PyTorch's
# Variant in the records, name in the figure, colour.
STACKS = (("torch grouped", "PyTorch, grouped matmul", "#9ecae9"), ("dense-map captured", "dense map on the same kernels", "#f2a28f"),
          ("sparse captured", "Waybill", "#4C78A8"))  # fmt: skip


def text(x, y, content, size=13, color="#222", weight="normal", anchor="start"):
    return f'<text x="{x:.0f}" y="{y:.0f}" {FONT} font-size="{size}" fill="{color}" font-weight="{weight}" text-anchor="{anchor}">{content}</text>'


def steps_of(records):
    """{case: {variant: ms}} of one rank under natural routes, for cases that all three stacks have."""
    cases = {}
    for r in records:
        if r["op"] == "moe fwd+bwd" and r["load"] == "natural" and r.get("ranks") == 1 and r["checked"]:
            cases.setdefault(r["case"], {})[r["variant"]] = r["value"] / 1e3
    return {case: steps for case, steps in cases.items() if all(variant in steps for variant, _, _ in STACKS)}


def figure(header, records, state):
    """SVG; None where the results lack what it compares. state: what came of the run's checks."""
    cases = steps_of(records)
    if not cases:
        return None
    parts, y = [], 92
    for case, steps in cases.items():
        name, _, sizes = case.partition(" ")
        parts += [text(30, y + 13, name, 13, weight="bold"), text(30, y + 31, sizes, 12, "#555")]
        torch = steps[STACKS[0][0]]
        for variant, _, color in STACKS:
            ms, width = steps[variant], ROOM * steps[variant] / torch
            faster = f" ({torch / ms:.2f} times as fast)" if variant == STACKS[-1][0] else ""
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 3}" rx="2" fill="{color}"/>')
            parts.append(text(LEFT + width + 6, y + 11, f"{ms:.2f} ms{faster}", 11, "#222" if faster else "#555"))
            y += BAR
        y += GAP
    legend, x = [], 30
    for _, name, color in STACKS:
        legend += [f'<rect x="{x}" y="58" width="14" height="14" rx="2" fill="{color}"/>', text(x + 20, 70, name)]
        x += 44 + 7 * len(name)
    notes = [f"{header['gpu']}, one rank (nothing is exchanged), bf16, medians; run of {header['date']}, torch {header['torch']}.",
             f"State of that run: {state}.",
             "Each bar is a share of PyTorch's time at its shape. Drawn from bench/results by scripts/render_performance.py."]  # fmt: skip
    height = y + 60
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
            '<rect width="100%" height="100%" fill="white"/>', text(30, 34, "One MoE layer, forward and backward: shorter is better", 18, weight="bold")]
    foot = [text(30, y + 10 + 17 * i, note, 11, "#777") for i, note in enumerate(notes)]
    return "\n".join([*head, *legend, *parts, *foot, "</svg>"]) + "\n"
