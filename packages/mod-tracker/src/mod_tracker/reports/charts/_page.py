"""Charts as one HTML page, which is a single file and asks for nothing elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ._chart import Chart, Show
from ._colours import AREAS, PHASES
from ._flame import Frame
from ._memory_line import MemoryLine

ROW = 20  # pixels
SIZE = (1000, 260)  # of the line's picture, before it is fitted to the page

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d5d8dc }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #16181b; --line: #3a3e44 } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1100px;
  padding: 0 1rem; color: var(--ink); background: var(--paper) }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.key span { display: inline-block; margin-right: 1rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
.flame { position: relative; overflow: hidden; border-top: 1px solid var(--line) }
.flame button { position: absolute; height: 19px; padding: 0 3px; border: 0; border-radius: 2px;
  font: 12px/19px system-ui, sans-serif; text-align: left; color: #111; overflow: hidden;
  white-space: nowrap; cursor: pointer; box-shadow: inset -1px 0 var(--paper) }
.flame button:focus-visible { outline: 2px solid var(--ink); z-index: 1 }
svg { width: 100%; height: auto } svg text { font-size: 12px; fill: var(--ink) }
p.said { min-height: 1.45em; font-variant-numeric: tabular-nums }
"""

# A click on a frame makes it as wide as the chart; on the widest one, back to the whole.
SCRIPT = """
for (const chart of document.querySelectorAll('.flame')) {
  const frames = [...chart.querySelectorAll('button')], said = chart.nextElementSibling;
  let from = 0, width = 1;
  const draw = () => frames.forEach(frame => {
    const left = (frame.dataset.at - from) / width, wide = frame.dataset.part / width;
    frame.style.left = 100 * Math.max(left, 0) + '%';
    frame.style.width = 100 * (Math.min(left + wide, 1) - Math.max(left, 0)) + '%';
    frame.hidden = left + wide <= 1e-9 || left >= 1 - 1e-9;
  });
  frames.forEach(frame => {
    const say = () => { said.textContent = frame.title; };
    frame.addEventListener('mouseenter', say); frame.addEventListener('focus', say);
    frame.addEventListener('click', () => {
      const again = from == frame.dataset.at && width == frame.dataset.part;
      from = again ? 0 : +frame.dataset.at; width = again ? 1 : +frame.dataset.part; draw();
    });
  });
}
"""


def page(chart: Chart) -> str:
    """Write the page."""
    parts = [f"<h1>{escape(chart.title)}</h1>", *_flame(chart)]
    if chart.line is not None:
        parts += _memory(chart.line, chart.show_time, chart.show_bytes)
    parts += [f"<p>{escape(note)}</p>" for note in chart.notes]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(chart.title)}</title><style>{STYLE}</style></head>\n<body>"
        + "\n".join(parts)
        + f"\n<script>{SCRIPT}</script></body></html>\n"
    )


def _key(colours: Sequence[tuple[str, str]]) -> str:
    items = (f'<span><i style="background:{c}"></i>{escape(name)}</span>' for name, c in colours)
    return f'<p class="key">{"".join(items)}</p>'


def _flame(chart: Chart) -> list[str]:
    drawn, whole = chart.drawn, chart.whole
    if not drawn:
        return ["<p>Nothing was counted.</p>"]
    phases = [phase for phase in PHASES if any(frame.amounts.get(phase) for frame in drawn)]
    height = ROW * (1 + max(frame.depth for frame in drawn))
    left_out = len(chart.frames) - len(drawn)
    return [
        "<p>Each module is as wide as its amount, and the modules inside it are below it; width "
        "with nothing below is the module's own. Click a module to zoom in.</p>",
        _key([(phase, PHASES[phase]) for phase in phases]),
        f'<div class="flame" style="height:{height}px">',
        *(_frame(frame, whole, chart.show) for frame in drawn),
        '</div><p class="said"></p>',
        *([f"<p>Too narrow to draw, and left out: {left_out}.</p>"] if left_out else []),
    ]


def _frame(frame: Frame, whole: int, show: Show) -> str:
    at, part = frame.start / whole, frame.total / whole
    name = frame.name or "(outside)"
    words = [f"{phase} {show(n)}" for phase, n in frame.amounts.items() if phase]
    more = ", ".join([*words, f"itself {show(frame.own)}"])
    title = f"{name}: {show(frame.total)}, {part:.1%} ({more})"
    stops, done = [], 0
    for phase, amount in frame.amounts.items():
        ends = (100 * done / frame.total, 100 * (done + amount) / frame.total)
        stops += [f"{PHASES.get(phase, PHASES['forward'])} {end:.2f}%" for end in ends]
        done += amount
    return (
        f'<button data-at="{at:.9f}" data-part="{part:.9f}" title="{escape(title)}" style="'
        f"left:{100 * at:.6f}%;width:{100 * part:.6f}%;top:{ROW * frame.depth}px;"
        f'background:linear-gradient(90deg,{",".join(stops)})">{escape(frame.label)}'
        "</button>"
    )


def _memory(line: MemoryLine, show_time: Show, show_bytes: Show) -> list[str]:
    wide, high = SIZE
    across, up = wide / max(line.end, 1), high / max(line.peak, 1)
    colours = [
        (area.name or "(outside)", AREAS[i % len(AREAS)]) for i, area in enumerate(line.areas)
    ]
    below = [0] * len(line.moments)
    shapes = []
    for area, (name, colour) in zip(line.areas, colours, strict=True):
        above = [low + more for low, more in zip(below, area.live, strict=True)]
        points = [*_steps(line, above), *reversed(list(_steps(line, below)))]
        drawn = " ".join(f"{at * across:.1f},{high - held * up:.1f}" for at, held in points)
        said = escape(f"{name}: at most {show_bytes(area.peak)}")
        shapes.append(f'<polygon points="{drawn}" fill="{colour}"><title>{said}</title></polygon>')
        below = above
    ends = [*(at for at, _ in line.phases[1:]), line.end]
    for (at, phase), end in zip(line.phases, ends, strict=True):
        shapes.append(
            f'<rect x="{at * across:.1f}" y="{high + 4}" width="{(end - at) * across:.1f}" '
            f'height="10" fill="{PHASES.get(phase, PHASES["outside"])}"><title>{escape(phase)}'
            "</title></rect>"
        )
    ran = [phase for phase in PHASES if phase in {phase for _, phase in line.phases}]
    return [
        "<h2>Memory over time</h2>",
        f"<p>Bytes alive, by the module that allocated them; {show_bytes(line.peak)} at most, in "
        f"{show_time(line.end)}. The strip below shows the phase.</p>",
        _key(colours),
        f'<svg viewBox="0 0 {wide} {high + 16}" role="img" aria-label="Bytes alive over time">',
        *shapes,
        "</svg>",
        _key([(phase, PHASES[phase]) for phase in ran]),
    ]


def _steps(line: MemoryLine, held: Sequence[int]) -> list[tuple[int, int]]:
    """Corners of a line that stays level until it changes."""
    points: list[tuple[int, int]] = []
    for at, end, size in zip(line.moments, [*line.moments[1:], line.end], held, strict=True):
        points += [(at, size), (end, size)]
    return points
