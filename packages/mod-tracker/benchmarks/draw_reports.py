"""Draw what `bench_reports.py` has written: how much longer a step takes, on a scale of powers.

    python packages/mod-tracker/benchmarks/draw_reports.py FILE.json FILE.svg

Needs the standard library only; the same numbers always give the same file.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from xml.sax.saxutils import escape

# On a phone a chart is 370 pixels wide, and labels of 14 are 10 there.
WIDTH, LABELS, RIGHT, ROW, TOP = 520, 206, 116, 26, 94
LEAST, MOST = 0.9, 64
TICKS = (1, 4, 16, 64)
# Colours follow the reader's scheme; an image has no other way to know it.
STYLE = """
  text { font: 14px sans-serif; fill: #222 } .title { font-weight: bold; font-size: 17px }
  .small { fill: #666 } .torchs { fill: #9e9e9e } .ours { fill: #3f51b5 }
  .first { fill: none; stroke-width: 1.5 } .first.ours { stroke: #3f51b5 }
  .first.torchs { stroke: #9e9e9e } line { stroke: #ddd } .must { stroke: #c62828 }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .small { fill: #aaa } .torchs { fill: #757575 } .ours { fill: #7986cb }
    .first.ours { stroke: #7986cb } .first.torchs { stroke: #757575 } line { stroke: #444 }
    .must { stroke: #ef9a9a } .paper { fill: #1e2129 }
  }
"""


def at(ratio):
    """Where a ratio is drawn."""
    share = math.log(max(ratio, LEAST) / LEAST) / math.log(MOST / LEAST)
    return LABELS + share * (WIDTH - LABELS - RIGHT)


def text(x, y, said, kind="", anchor="start"):
    """One line of text."""
    name = f' class="{kind}"' if kind else ""
    return f'  <text x="{x:.1f}" y="{y:g}" text-anchor="{anchor}"{name}>{escape(said)}</text>'


def row_of(name, row, y):
    """A dot for later steps, a line for its range over runs, a ring for the first step."""
    kind = "torchs" if name.startswith("torch") else "ours"
    low, high = row["later"]
    first = sum(row["first"]) / 2
    said = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
    parts = [
        text(LABELS - 12, y + 4, name, anchor="end"),
        f'  <circle class="first {kind}" cx="{at(first):.1f}" cy="{y:g}" r="4"/>',
        f'  <rect class="{kind}" x="{at(low) - 4:.1f}" y="{y - 4:g}" '
        f'width="{at(high) - at(low) + 8:.1f}" height="8" rx="4"/>',
        text(WIDTH - RIGHT + 12, y + 4, said),
    ]
    for most in row.get("must", {}).values():
        x = f"{at(most):.1f}"
        parts.append(f'  <line class="must" x1="{x}" x2="{x}" y1="{y - 8:g}" y2="{y + 8:g}"/>')
    return parts


def draw(result):
    """The chart as SVG, a panel for each width."""
    title = "How much longer a step takes under each report"
    under = (
        f"Six encoder layers on a CPU, torch {result['torch']}, {result['runs']} runs",
        "dot: later steps; ring: first step; red line: target",
    )
    body, y = [], TOP
    for width, found in result["widths"].items():
        rows = {name: row for name, row in found["rows"].items() if name != "plain"}
        low, high = found["plain_ms"]
        body.append(text(10, y, f"Width {width}: a plain step takes {low:.1f} to {high:.1f} ms"))
        bottom = y + 14 + len(rows) * ROW
        for tick in TICKS:
            x = f"{at(tick):.1f}"
            body.append(f'  <line x1="{x}" x2="{x}" y1="{y + 8}" y2="{bottom}"/>')
            body.append(text(at(tick), bottom + 18, f"{tick}x", "small", "middle"))
        for number, (name, row) in enumerate(rows.items()):
            body += row_of(name, row, y + 22 + number * ROW)
        y = bottom + 52
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
            f'viewBox="0 0 {WIDTH} {y}" role="img">',
            f"  <title>{escape(title)}</title>",
            f"  <style>{STYLE}  </style>",
            f'  <rect class="paper" width="{WIDTH}" height="{y}" fill="none"/>',
            text(10, 26, title, "title"),
            *(text(10, 46 + 18 * n, line, "small") for n, line in enumerate(under)),
            *body,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(draw(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")
