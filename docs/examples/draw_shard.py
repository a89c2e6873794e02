"""Draw how a unit is sharded: its parameters in one flat buffer, and each rank's range of it.

    python docs/examples/draw_shard.py   # writes docs/shard.svg

The ranges are those of `plan_shard`, so the picture is what happens.
"""

from __future__ import annotations

from pathlib import Path

from draw_llama import WIDTH, head, text
from torch import nn

from flat_param import ShardPlan, collect_params, plan_layout, plan_shard

HERE = Path(__file__).parent
LEFT, TOP, BAR, RANKS = 94, 66, 34, 4
COLOURS = ("#3f51b5", "#e6862a", "#00897b", "#8e24aa")
STYLE = """
  .in { fill: #fff } .gap { fill: #bdbdbd }
  @media (prefers-color-scheme: dark) { .in { fill: #fff } .gap { fill: #616161 } }
"""


def planned() -> ShardPlan:
    """A block of three parameters, divided between four ranks."""
    module = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6, bias=False))
    specs, _ = collect_params(module)
    return plan_shard(plan_layout(specs), world_size=RANKS)


def draw(plan: ShardPlan) -> str:
    """The buffer above, and below it what each rank holds of it, as SVG."""
    layout = plan.layout
    whole = plan.shard_numel * RANKS
    scale = (WIDTH - LEFT - 10) / whole
    below = TOP + BAR + 22
    height = below + RANKS * (BAR + 12) + 30
    title = f"A unit of {len(layout.specs)} parameters on {RANKS} ranks"
    parts = [
        *head(title, ["grey: a gap or the padding at the end, always zero"], height, STYLE),
        text(10, TOP + 22, "flat buffer"),
        f'  <rect class="gap" x="{LEFT}" y="{TOP}" width="{whole * scale:.1f}" height="{BAR}"/>',
    ]
    for index, (start, stop) in enumerate(layout.ranges):
        spec = layout.specs[index]
        parts += _box(start, stop, TOP, scale, COLOURS[index], f"{spec.name} {tuple(spec.shape)}")
    for rank in range(RANKS):
        y = below + rank * (BAR + 12)
        low, high = plan.ranges[rank]
        parts.append(text(10, y + 22, f"rank {rank}"))
        x, width = LEFT + low * scale, (high - low) * scale
        parts.append(
            f'  <rect class="gap" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>'
        )
        for index, (start, stop) in enumerate(layout.ranges):
            a, b = max(start, low), min(stop, high)
            if a < b:
                part = f"[{a - start}:{b - start}]" if (a, b) != (start, stop) else "all"
                parts += _box(a, b, y, scale, COLOURS[index], part)
    foot = f"{plan.shard_numel} elements a rank; forward gathers them, then frees them"
    parts.append(text(10, height - 10, foot, "small"))
    return "\n".join([*parts, "</svg>", ""])


def _box(start: int, stop: int, y: int, scale: float, colour: str, said: str) -> list[str]:
    x, width = LEFT + start * scale, (stop - start) * scale
    parts = [
        f'  <rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}" '
        f'stroke="#fff"><title>{said}</title></rect>'
    ]
    if len(said) * 8 < width:
        parts.append(text(round(x + 5, 1), y + 22, said, "in"))
    return parts


if __name__ == "__main__":
    (HERE.parent / "shard.svg").write_text(draw(planned()), encoding="utf-8")
