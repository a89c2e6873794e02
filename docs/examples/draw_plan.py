"""Draw `plan_memory.json`, which `plan_memory.py` wrote: memory against time, and the limit.

    python docs/examples/draw_plan.py plan_memory.json plan-memory.svg

Needs the standard library only; the same numbers always give the same file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from draw_llama import WIDTH, head, text

PLOT, LEFT, TOP, BOTTOM = 330, 52, 90, 50  # the list of the dots is below the plot
MIB = 2**20
LIMIT = ".limit { stroke: #c62828; stroke-dasharray: 5 4 } .spread { stroke: #757575 }"
AXIS = ".axis { stroke: #757575 }"


def draw(result: dict[str, Any]) -> str:
    """The front as SVG: a dot for each measured choice on one rank, its spread as a line."""
    rows = [*result["measured"], result["recommended"]]
    rows[-1] = rows[-1] | {"way": "recommended: " + rows[-1]["way"]}
    limit = result["limit_bytes"] / MIB
    widest = 1.1 * max(limit, *(row["total_bytes"] / MIB for row in rows))
    slowest = 1.05 * max(row["time_ratio"][2] for row in rows)
    base, right, height = TOP + PLOT, WIDTH - 10, TOP + PLOT + BOTTOM + 22 * len(rows) + 14

    def x(mib: float) -> float:
        return LEFT + (right - LEFT) * mib / widest

    def y(ratio: float) -> float:
        return base - (base - TOP) * ratio / slowest

    under = [
        f"{result['blocks']} blocks, torch {result['versions']['torch']}; "
        "a line is the spread of the turns"
    ]
    parts = [
        *head("What a step holds, and how long it takes", under, height, LIMIT + AXIS),
        f'  <path class="axis" fill="none" d="M{LEFT} {TOP}V{base}H{right}"/>',
        text((LEFT + right) / 2, base + 36, "MiB a rank", "small", "middle"),
        text(10, TOP - 10, "time of a plain step = 1", "small"),
        f'  <path class="limit" d="M{x(limit):.1f} {TOP}V{base}"/>',
        text(x(limit) - 6, base - 10, f"limit {limit:.0f} MiB", "small", "end"),
    ]
    for mib in range(0, int(widest) + 1, 20):
        parts.append(text(x(mib), base + 16, str(mib), "small", "middle"))
    for tenth in range(0, int(10 * slowest) + 1, 5):
        parts.append(text(LEFT - 8, y(tenth / 10) + 4, f"{tenth / 10:.1f}", "small", "end"))
    for number, row in enumerate(rows, start=1):
        low, middle, high = row["time_ratio"]
        place = x(row["total_bytes"] / MIB)
        kind = "plain" if row["blocks"] == 0 else "way"
        named = row["way"] if kind == "plain" else f"{row['way']}, {row['blocks']}"
        parts += [
            f'  <path class="spread" d="M{place:.1f} {y(low):.1f}V{y(high):.1f}"/>',
            f'  <circle class="{kind}" cx="{place:.1f}" cy="{y(middle):.1f}" r="5"/>',
            text(place, y(low) + 18 + 15 * (number % 3), str(number), "small", "middle"),
            text(10, base + BOTTOM + 22 * number, f"{number}  {named}", "small"),
        ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(draw(measured), encoding="utf-8")
