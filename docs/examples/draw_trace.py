"""Draw a step's timeline, as Perfetto shows it, from the file that mod-tracker's `trace` writes.

    python docs/examples/draw_trace.py --measure  # trains a step, writes docs/examples/trace.json
    python docs/examples/draw_trace.py            # draws it: docs/trace.svg

Calls lie below the call that made them; the same file always gives the same picture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
WIDTH, ROW, TOP, LEFT = 820, 22, 66, 10
PHASES = {"forward": "#3f51b5", "recompute": "#e6862a", "backward": "#00897b"}
STYLE = """
  text { font: 12px sans-serif; fill: #222 } .title { font-weight: bold; font-size: 15px }
  .small { fill: #666 } .in { fill: #fff; font-size: 11px }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .small { fill: #aaa } .in { fill: #fff } .paper { fill: #1e2129 }
  }
"""


class Call(NamedTuple):
    """One bar: microseconds from the first event, and how many calls are around it."""

    name: str
    phase: str
    start: float
    stop: float
    depth: int


def calls(events: list[dict[str, Any]]) -> list[Call]:
    """The bars of a trace; threads share the rows, as their calls do not overlap in one step."""
    found, open_calls = [], []
    begin = min(event["ts"] for event in events)
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["ph"] == "B":
            open_calls.append(event)
        elif event["ph"] == "E":
            first = open_calls.pop()
            start, stop = first["ts"] - begin, event["ts"] - begin
            found.append(Call(first["name"], first["cat"], start, stop, len(open_calls)))
    return sorted(found, key=lambda call: (call.start, call.depth))


def draw(trace: dict[str, Any]) -> str:
    """The timeline as SVG."""
    bars = calls(trace["traceEvents"])
    whole, rows = max(bar.stop for bar in bars), 1 + max(bar.depth for bar in bars)
    scale, height = (WIDTH - 2 * LEFT) / whole, TOP + rows * (ROW + 2) + 34
    title = "One training step of two checkpointed blocks, by module"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"  <title>{escape(title)}</title>",
        f"  <style>{STYLE}  </style>",
        f'  <rect class="paper" width="{WIDTH}" height="{height}" fill="none"/>',
        f'  <text class="title" x="{LEFT}" y="24">{escape(title)}</text>',
    ]
    for index, (phase, colour) in enumerate(PHASES.items()):
        x = LEFT + 120 * index
        parts.append(f'  <rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>')
        parts.append(f'  <text class="small" x="{x + 18}" y="48">{phase}</text>')
    for bar in bars:
        x, y = LEFT + bar.start * scale, TOP + bar.depth * (ROW + 2)
        width = max((bar.stop - bar.start) * scale, 0.5)
        parts.append(
            f'  <rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" rx="2" '
            f'fill="{PHASES[bar.phase]}"><title>{escape(bar.name)}, {bar.phase}</title></rect>'
        )
        label = bar.name if len(bar.name) * 6.2 < width else bar.name.rpartition(".")[2]
        if len(label) * 6.2 < width:
            parts.append(f'  <text class="in" x="{x + 4:.1f}" y="{y + 15}">{escape(label)}</text>')
    foot = f"{len(bars)} calls, {whole / 1000:.1f} ms from left to right"
    parts.append(f'  <text class="small" x="{LEFT}" y="{height - 12}">{foot}</text>')
    return "\n".join([*parts, "</svg>", ""])


def measure() -> str:
    """Train a step of two checkpointed blocks and give its trace."""
    import torch
    from torch import nn

    from ckpt_wrap import checkpoint_
    from mod_tracker import trace

    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))  # noqa: E731
    model = nn.Sequential(block(), block(), nn.Linear(256, 16))
    for layer in model[:2]:
        checkpoint_(layer)
    x = torch.randn(256, 256)
    for _ in range(20):  # until the caches and the allocator are warm
        model(x).sum().backward()
    with trace(model) as timeline:
        model(x).sum().backward()
    return timeline.to_json()


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        (HERE / "trace.json").write_text(measure() + "\n", encoding="utf-8")
    found = json.loads((HERE / "trace.json").read_text(encoding="utf-8"))
    (HERE.parent / "trace.svg").write_text(draw(found), encoding="utf-8")
