"""Draw `llama.json`, which `measure_llama.py` wrote, as a chart of bars.

    python docs/examples/draw_llama.py            # writes docs/llama.svg

Needs the standard library only; the same numbers always give the same file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
WIDTH, BAR, GAP, TOP, LABELS = 820, 26, 14, 60, 345
# Colours follow the reader's scheme; an image has no other way to know it.
STYLE = """
  text { font: 13px sans-serif; fill: #222 } .title { font-weight: bold; font-size: 15px }
  .small { fill: #666; font-size: 12px } .plain { fill: #9e9e9e } .way { fill: #3f51b5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .small { fill: #aaa } .plain { fill: #757575 } .way { fill: #7986cb }
    .paper { fill: #1e2129 }
  }
"""


def text(x: float, y: float, said: str, name: str = "", anchor: str = "start") -> str:
    """One line of text."""
    kind = f' class="{name}"' if name else ""
    return f'  <text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(said)}</text>'


def bar(row: dict[str, Any], most: int, y: float) -> list[str]:
    """A label, a bar as long as the bytes, and what they are."""
    length = (WIDTH - LABELS - 170) * row["kept_bytes"] / most
    kind = "plain" if row["way"] == "plain" else "way"
    said = f"{row['kept_bytes'] / 2**20:.1f} MiB"
    if kind == "way":
        said += f", {most / row['kept_bytes']:.1f} times less"
    middle = y + BAR * 0.68
    return [
        text(LABELS - 10, middle, row["way"], anchor="end"),
        f'  <rect class="{kind}" x="{LABELS}" y="{y:g}" width="{length:.1f}" height="{BAR}"/>',
        text(LABELS + length + 8, middle, said),
    ]


def draw(result: dict[str, Any]) -> str:
    """The chart as SVG."""
    rows, model = result["rows"], result["model"]
    if not all(row["equal"] for row in rows):
        raise ValueError("draw_llama: gradients differ, so there is nothing to compare.")
    most = max(row["kept_bytes"] for row in rows)
    height = TOP + len(rows) * (BAR + GAP) + 30
    title = "Kept between forward and backward; all gradients equal, every bit"
    under = (
        f"{model['class']}, {model['num_hidden_layers']} layers, width {model['hidden_size']}, "
        f"{model['batch']} x {model['tokens']} tokens, float32, torch {result['versions']['torch']}"
        f", transformers {result['versions']['transformers']}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"  <title>{escape(title)}</title>",
        f"  <style>{STYLE}  </style>",
        f'  <rect class="paper" width="{WIDTH}" height="{height}" fill="none"/>',
        text(10, 26, title, "title"),
        text(10, 46, under, "small"),
    ]
    for index, row in enumerate(rows):
        parts += bar(row, most, TOP + 10 + index * (BAR + GAP))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    measured = json.loads((HERE / "llama.json").read_text(encoding="utf-8"))
    (HERE.parent / "llama.svg").write_text(draw(measured), encoding="utf-8")
