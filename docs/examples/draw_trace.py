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

from draw_llama import WIDTH, head, text

HERE = Path(__file__).parent
ROW, TOP, LEFT = 26, 66, 10
PHASES = {"forward": "#3f51b5", "recompute": "#e6862a", "backward": "#00897b"}
STYLE = """
  .in { fill: #fff; font-size: 13px }
  @media (prefers-color-scheme: dark) { .in { fill: #fff } }
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
    title = "A step of two checkpointed blocks, by module"
    parts = head(title, [], height, STYLE)
    for index, (phase, colour) in enumerate(PHASES.items()):
        x = LEFT + 120 * index
        parts.append(f'  <rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 18, 49, phase, "small"))
    for bar in bars:
        x, y = LEFT + bar.start * scale, TOP + bar.depth * (ROW + 2)
        width = max((bar.stop - bar.start) * scale, 0.5)
        parts.append(
            f'  <rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" rx="2" '
            f'fill="{PHASES[bar.phase]}"><title>{escape(bar.name)}, {bar.phase}</title></rect>'
        )
        label = bar.name if len(bar.name) * 7.4 < width else bar.name.rpartition(".")[2]
        if len(label) * 7.4 < width:
            parts.append(text(round(x + 4, 1), y + 18, label, "in"))
    foot = f"{len(bars)} calls, {whole / 1000:.1f} ms from left to right"
    parts.append(text(LEFT, height - 12, foot, "small"))
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
