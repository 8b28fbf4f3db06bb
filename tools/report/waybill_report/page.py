# SPDX-License-Identifier: Apache-2.0
"""The HTML page: facts on top, figures, sample, config. Everything is inside the file; it opens without a network."""

import html

from plotly import io as plotly_io
from plotly import offline

from waybill_report import plots

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:24px auto;padding:0 16px;color:#222}
h1{margin-bottom:4px}.sub{color:#666;margin-top:0}
.facts{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}
.fact{border:1px solid #ddd;border-radius:8px;padding:8px 14px;min-width:120px}
.fact b{display:block;font-size:20px}.fact span{color:#666;font-size:13px}
pre{background:#f6f6f6;border-radius:8px;padding:12px;overflow:auto;white-space:pre-wrap}
.none{color:#888;font-style:italic}
"""


def tail_mean(values, count=20):
    values = [value for value in values if value is not None][-count:]
    return sum(values) / len(values) if values else None


def number(value):
    return "not finite" if value is None else f"{value:.4f}"


def facts_of(run):
    """(value, label) pairs; facts that the run did not record are left out."""
    last = run.steps[-1]
    facts = [(f"{last['step']}", "steps")]
    if run.evals:
        facts.append((number(run.evals[-1]["loss"]), "held-out loss, nats"))
    facts.append((number(last["loss"]), "last training loss"))
    for key, label in (("unigram_entropy", "unigram entropy"), ("bigram_entropy", "bigram entropy")):
        if run.header.get(key):
            facts.append((f"{run.header[key]:.4f}", label))
    if run.header.get("parameters"):
        facts.append((f"{run.header['parameters'] / 1e6:.2f} M", "parameters"))
    if run.header.get("active_parameters"):
        facts.append((f"{run.header['active_parameters'] / 1e6:.2f} M", "active a token"))
    recipes = dict.fromkeys(layer["recipe"] for layer in run.header.get("layers", []) if isinstance(layer, dict) and isinstance(layer.get("recipe"), str))
    if recipes:
        facts.append((", ".join(recipes), "recipe of the experts"))
    if run.header.get("world"):
        facts.append((f"{run.header['world']}", "ranks"))
    for key, label, form in (("tokens_per_s", "tokens/s (last 20 steps)", "{:,.0f}"), ("tflops", "TFLOP/s", "{:.4f}"), ("mfu", "MFU", "{:.1%}"),
                             ("ceiling_share", "of the measured ceiling", "{:.1%}")):  # fmt: skip
        value = tail_mean([step.get(key) for step in run.steps])
        if value is not None:
            facts.append((form.format(value), label))
    invalid = sum(1 for step in run.steps if step.get("valid") is False)
    if invalid:
        facts.append((str(invalid), "steps without an update: loss or gradient not finite"))
    return facts


def render(run):
    name = html.escape(str(run.header.get("name") or run.folder.name))
    subtitle = [f"waybill {run.header['version']}" if run.header.get("version") else "", str(run.header.get("created", "")),
                f"resumed {run.num_resumes} times" if run.num_resumes else "", "" if run.end else "run not finished"]  # fmt: skip
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>',
        f"<script>{offline.get_plotlyjs()}</script></head><body><h1>{name}</h1>",
        f'<p class="sub">{html.escape(" - ".join(part for part in subtitle if part))}</p><div class="facts">',
    ]
    parts += [f'<div class="fact"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>' for value, label in facts_of(run)]
    parts.append("</div>")
    for section in plots.SECTIONS:
        figure = section(run)
        if figure is None:
            parts.append(f'<p class="none">{section.__name__.replace("_", " ")}: not recorded by this run</p>')
        else:
            # The div ids are fixed, so that the same run gives the same file.
            parts.append(plotly_io.to_html(figure, include_plotlyjs=False, full_html=False, div_id=section.__name__, config={"displayModeBar": False}))
    if run.sample:
        parts.append(f"<h2>Sample</h2><pre>{html.escape(run.sample)}</pre>")
    if run.config:
        parts.append(f"<details><summary>config.toml</summary><pre>{html.escape(run.config)}</pre></details>")
    parts.append("</body></html>\n")
    return "\n".join(parts)
