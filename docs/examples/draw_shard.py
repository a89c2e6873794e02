"""Draw how a unit is sharded: its parameters in one flat buffer, and each rank's range of it.

    python docs/examples/draw_shard.py   # writes docs/shard.svg

The ranges are those of `plan_shard`, so the picture is what happens.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from flat_param import ShardPlan, collect_params, plan_layout, plan_shard

HERE = Path(__file__).parent
WIDTH, LEFT, BAR, RANKS = 820, 110, 34, 4
COLOURS = ("#3f51b5", "#e6862a", "#00897b", "#8e24aa")
STYLE = """
  text { font: 13px sans-serif; fill: #222 } .title { font-weight: bold; font-size: 15px }
  .small { fill: #666; font-size: 12px } .in { fill: #fff } .gap { fill: #bdbdbd }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .small { fill: #aaa } .in { fill: #fff } .gap { fill: #616161 }
    .paper { fill: #1e2129 }
  }
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
    scale = (WIDTH - LEFT - 20) / whole
    height = 120 + RANKS * (BAR + 12) + 30
    title = f"A unit of {len(layout.specs)} parameters on {RANKS} ranks"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"  <title>{title}</title>",
        f"  <style>{STYLE}  </style>",
        f'  <rect class="paper" width="{WIDTH}" height="{height}" fill="none"/>',
        f'  <text class="title" x="10" y="24">{title}</text>',
        '  <text class="small" x="10" y="44">grey: a gap or the padding at the end, always zero'
        "</text>",
        '  <text x="10" y="86">flat buffer</text>',
        f'  <rect class="gap" x="{LEFT}" y="64" width="{whole * scale:.1f}" height="{BAR}"/>',
    ]
    for index, (start, stop) in enumerate(layout.ranges):
        spec = layout.specs[index]
        parts += _box(start, stop, 64, scale, COLOURS[index], f"{spec.name} {tuple(spec.shape)}")
    for rank in range(RANKS):
        y = 120 + rank * (BAR + 12)
        low, high = plan.ranges[rank]
        parts.append(f'  <text x="10" y="{y + 22}">rank {rank}</text>')
        x, width = LEFT + low * scale, (high - low) * scale
        parts.append(
            f'  <rect class="gap" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>'
        )
        for index, (start, stop) in enumerate(layout.ranges):
            a, b = max(start, low), min(stop, high)
            if a < b:
                part = f"[{a - start}:{b - start}]" if (a, b) != (start, stop) else "all"
                parts += _box(a, b, y, scale, COLOURS[index], part)
    foot = f"{plan.shard_numel} elements on each rank; forward gathers them and lets them go again"
    parts.append(f'  <text class="small" x="10" y="{height - 10}">{foot}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _box(start: int, stop: int, y: int, scale: float, colour: str, said: str) -> list[str]:
    x, width = LEFT + start * scale, (stop - start) * scale
    parts = [
        f'  <rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}" '
        f'stroke="#fff"><title>{said}</title></rect>'
    ]
    if len(said) * 7 < width:
        parts.append(f'  <text class="in" x="{x + 5:.1f}" y="{y + 22}">{said}</text>')
    return parts


if __name__ == "__main__":
    (HERE.parent / "shard.svg").write_text(draw(planned()), encoding="utf-8")
