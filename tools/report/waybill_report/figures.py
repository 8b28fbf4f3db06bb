# SPDX-License-Identifier: Apache-2.0
"""A self-contained page of figures: what the small report commands share."""

import html
import pathlib
import sys

from waybill_report.run import RunError


def write_figures(title, figures, output):
    """One HTML file with plotly inside; `figures` is a list of plotly figures."""
    from plotly import io as plotly_io
    from plotly import offline

    from waybill_report.__main__ import write_atomically

    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:24px auto;padding:0 16px}</style>",
        f"<script>{offline.get_plotlyjs()}</script></head><body><h1>{html.escape(title)}</h1>",
    ]
    parts += [
        plotly_io.to_html(figure, include_plotlyjs=False, full_html=False, div_id=f"figure-{index}", config={"displayModeBar": False})
        for index, figure in enumerate(figures)
    ]
    parts.append("</body></html>\n")
    write_atomically(pathlib.Path(output), "\n".join(parts))


def run_command(name, body):
    """Calls body(); a failure is one line and exit code 2."""
    try:
        print(f"{name}: {body()}")
        return 0
    except ImportError as error:
        print(f"{name}: the package {error.name} is missing; run scripts/setup.sh demo", file=sys.stderr)
    except (RunError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
    return 2
