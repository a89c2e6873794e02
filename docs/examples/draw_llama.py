"""Draw `llama.json`, which `measure_llama.py` wrote, as a chart of bars.

    python docs/examples/draw_llama.py            # writes docs/llama.svg

Needs the standard library only; the same numbers always give the same file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
# On a phone a chart is 370 pixels wide: labels of 14 are 10 there, where of 820 they would be 6.
WIDTH, ROW, BAR, TOP = 520, 50, 22, 76
# Colours follow the reader's scheme; an image has no other way to know it.
STYLE = """
  text { font: 15px sans-serif; fill: #222 } .title { font-weight: bold; font-size: 17px }
  .small { fill: #666; font-size: 14px } .plain { fill: #9e9e9e } .way { fill: #3f51b5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .small { fill: #aaa } .plain { fill: #757575 } .way { fill: #7986cb }
    .paper { fill: #1e2129 }
  }
"""


def text(x: float, y: float, said: str, name: str = "", anchor: str = "start") -> str:
    """One line of text."""
    kind = f' class="{name}"' if name else ""
    return f'  <text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(said)}</text>'


def head(title: str, under: Sequence[str], height: int, style: str = "") -> list[str]:
    """The beginning of a chart, up to its title and the lines below it."""
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"  <title>{escape(title)}</title>",
        f"  <style>{STYLE}{style}  </style>",
        f'  <rect class="paper" width="{WIDTH}" height="{height}" fill="none"/>',
        text(10, 24, title, "title"),
        *(text(10, 44 + 18 * n, line, "small") for n, line in enumerate(under)),
    ]


def bar(row: dict[str, Any], most: int, y: float) -> list[str]:
    """A label, below it a bar as long as the bytes, and what they are."""
    length = (WIDTH - 200) * row["kept_bytes"] / most
    kind = "plain" if row["way"] == "plain" else "way"
    said = f"{row['kept_bytes'] / 2**20:.1f} MiB"
    if kind == "way":
        said += f", {most / row['kept_bytes']:.1f} times less"
    return [
        text(10, y, row["way"]),
        f'  <rect class="{kind}" x="10" y="{y + 6:g}" width="{length:.1f}" height="{BAR}"/>',
        text(18 + length, y + 22, said),
    ]


def draw(result: dict[str, Any]) -> str:
    """The chart as SVG."""
    rows, model, versions = result["rows"], result["model"], result["versions"]
    if not all(row["equal"] for row in rows):
        raise ValueError("draw_llama: gradients differ, so there is nothing to compare.")
    most = max(row["kept_bytes"] for row in rows)
    under = [
        f"{model['class']}, {model['num_hidden_layers']} layers, width {model['hidden_size']}, "
        f"{model['batch']} x {model['tokens']} tokens, float32; torch",
        f"{versions['torch']}, transformers {versions['transformers']}; every gradient equal to "
        "the last bit",
    ]
    parts = head("Kept between forward and backward", under, TOP + len(rows) * ROW + 6)
    for index, row in enumerate(rows):
        parts += bar(row, most, TOP + 14 + index * ROW)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    measured = json.loads((HERE / "llama.json").read_text(encoding="utf-8"))
    (HERE.parent / "llama.svg").write_text(draw(measured), encoding="utf-8")
