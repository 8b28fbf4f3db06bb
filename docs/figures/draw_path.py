#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/path.svg: what travels with a token in a dense-map design and in Waybill. Run it to renew the file.

Bytes are those of the case T = 8192 tokens a rank, E = 2304 experts, K = 36, 72 ranks of 32 experts, rows of 512 bf16 values.
"""
import pathlib

T, E, K, L, ROW = 8192, 2304, 36, 32, 1024
DENSE_MAP, COMPACT = T * E, T * K * 2
DENSE_ROW, SLICE = 4 * E, 4 * L
WIDTH, HEIGHT = 860, 380
FONT = 'font-family="DejaVu Sans, Arial, sans-serif"'


def text(x, y, content, size=14, color="#222", weight="normal", anchor="start"):
    return f'<text x="{x}" y="{y}" {FONT} font-size="{size}" fill="{color}" font-weight="{weight}" text-anchor="{anchor}">{content}</text>'


def bar(x, y, width, color):
    return f'<rect x="{x}" y="{y}" width="{max(width, 2):.1f}" height="22" rx="3" fill="{color}"/>'


def stage(x, label):
    return f'<rect x="{x}" y="62" width="118" height="34" rx="6" fill="#eef3f8" stroke="#4C78A8"/>' + text(x + 59, 84, label, 13, anchor="middle")


def comparison(y, title, rows, scale):
    parts = [text(30, y, title, 15, weight="bold")]
    for index, (name, size, shown, color) in enumerate(rows):
        top = y + 12 + 32 * index
        parts += [text(30, top + 16, name, 13), bar(190, top, size * scale, color), text(196 + max(size * scale, 2), top + 16, shown, 13, "#555")]
    return parts


def main():
    stages = ["router", "plan", "dispatch", "experts", "combine"]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
             '<rect width="100%" height="100%" fill="white"/>', text(30, 34, "The path of a token: sparse from end to end", 18, weight="bold")]  # fmt: skip
    for index, label in enumerate(stages):
        parts.append(stage(30 + 160 * index, label))
        if index:
            x = 30 + 160 * index
            parts.append(f'<path d="M {x - 40} 79 L {x - 6} 79" stroke="#4C78A8" stroke-width="2" marker-end="url(#head)"/>')
    parts.insert(2, '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
                    '<path d="M0,0 L6,3 L0,6 z" fill="#4C78A8"/></marker></defs>')  # fmt: skip
    parts += comparison(142, "Routes of one rank and layer", [
        ("dense map [T, E]", DENSE_MAP, f"{DENSE_MAP / 1e6:.2f} MB", "#E45756"),
        ("Waybill [T, K] int16", COMPACT, f"{COMPACT / 1e6:.2f} MB", "#54A24B")], 520 / DENSE_MAP)  # fmt: skip
    parts += comparison(242, "Weights that travel with one row", [
        ("all experts, fp32", DENSE_ROW, f"{DENSE_ROW:,} B beside a row of {ROW:,} B", "#E45756"),
        ("that rank's experts", SLICE, f"at most {SLICE} B", "#54A24B")], 420 / DENSE_ROW)  # fmt: skip
    note = f"T = {T:,} tokens a rank, E = {E:,} experts on 72 ranks ({L} each), K = {K}. Computed from the shapes, not measured."
    parts.append(text(30, 350, note, 12, "#777"))
    parts.append("</svg>")
    pathlib.Path(__file__).with_name("path.svg").write_text("\n".join(parts) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
