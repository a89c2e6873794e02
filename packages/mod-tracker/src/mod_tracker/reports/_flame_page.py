"""A flame chart by module as one HTML page: a single file that loads nothing from elsewhere.

A frame is a module where it was called. It lies below the module that called it, and is as wide as
its amount, that of the modules inside it included. What it does itself is the part of it below
which there is nothing. Plain numbers come in; this file knows no report and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape

Stack = tuple[str, ...]
"""Names of modules from the root to the one that runs; () is the outside."""

Amounts = dict[str, int]
"""Amounts by phase."""

COLOURS = {
    "forward": "#56b4e9",
    "recompute": "#e69f00",
    "backward": "#5fc9a6",
    "outside": "#b9bec5",
}
"""Of phases, told apart by those who do not see red and green alike."""

LEAST = 2000
"""Frames narrower than this part of the whole are not drawn."""

ROW = 20  # pixels

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d5d8dc }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #16181b; --line: #3a3e44 } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1100px;
  padding: 0 1rem; color: var(--ink); background: var(--paper) }
h1 { font-size: 1.3rem }
pre { overflow-x: auto; font-size: 12px }
.key span { display: inline-block; margin-right: 1rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
.flame { position: relative; overflow: hidden; border-top: 1px solid var(--line) }
.flame button { position: absolute; height: 19px; padding: 0 3px; border: 0; border-radius: 2px;
  font: 12px/19px system-ui, sans-serif; text-align: left; color: #111; overflow: hidden;
  white-space: nowrap; cursor: pointer; box-shadow: inset -1px 0 var(--paper) }
.flame button:focus-visible { outline: 2px solid var(--ink); z-index: 1 }
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


@dataclass(frozen=True)
class Frame:
    """One module where it was called.

    Attributes:
        name: of the module, "" for the outside.
        label: the same, less what the name of the module around it says already.
        depth: modules around it.
        start: amount of what lies before it in the chart.
        amounts: by phase, of the module and those inside it, in the order of the colours.
        own: amount of the module itself, in all phases.
    """

    name: str
    label: str
    depth: int
    start: int
    amounts: Amounts
    own: int

    @property
    def total(self) -> int:
        """Amount in all phases: the frame's width."""
        return sum(self.amounts.values())


class _Node:
    def __init__(self) -> None:
        self.amounts: Amounts = {}
        self.own = 0
        self.inside: dict[str, _Node] = {}

    def add(self, amounts: Mapping[str, int]) -> None:
        for phase, amount in amounts.items():
            self.amounts[phase] = self.amounts.get(phase, 0) + amount


def frames_of(stacks: Mapping[Stack, Amounts]) -> list[Frame]:
    """Lay out the frames, outer ones before inner ones, each kind in the order first seen.

    Frames without an amount are left out.

    Example:
        >>> frames = frames_of({("Net", "Net.0"): {"forward": 3}, ("Net",): {"backward": 1}})
        >>> [(frame.name, frame.start, frame.total, frame.own) for frame in frames]
        [('Net', 0, 4, 1), ('Net.0', 0, 3, 3)]
    """
    whole = _Node()
    for stack, amounts in stacks.items():
        node = whole
        for name in stack or ("",):
            node = node.inside.setdefault(name, _Node())
            node.add(amounts)
        node.own += sum(amounts.values())
    frames: list[Frame] = []
    level: list[tuple[_Node, str, int]] = [(whole, "", 0)]
    depth = 0
    while level:
        below = []
        for parent, around, start in level:
            for name, node in parent.inside.items():
                width = sum(node.amounts.values())
                if width <= 0:
                    continue
                label = name.removeprefix(f"{around}.") or "(outside)"
                frames.append(Frame(name, label, depth, start, _in_order(node.amounts), node.own))
                below.append((node, name, start))
                start += width
        level, depth = below, depth + 1
    return frames


def _in_order(amounts: Amounts) -> Amounts:
    known = {phase: amounts[phase] for phase in COLOURS if amounts.get(phase)}
    return known | {phase: amount for phase, amount in amounts.items() if amount}


def flame_page(
    title: str,
    stacks: Mapping[Stack, Amounts],
    show: Callable[[int], str],
    *,
    table: str = "",
    notes: Iterable[str] = (),
) -> str:
    """Write the page.

    Args:
        title: what the amounts are.
        stacks: amounts by stack and phase.
        show: writes an amount with its unit.
        table: what is written below the chart.
        notes: what a reader has to know.
    """
    parts = [f"<h1>{escape(title)}</h1>", *_flame(frames_of(stacks), show)]
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    parts += [f"<pre>{escape(table)}</pre>"] if table else []
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>"
        + "\n".join(parts)
        + f"\n<script>{SCRIPT}</script></body></html>\n"
    )


def _flame(frames: list[Frame], show: Callable[[int], str]) -> list[str]:
    whole = sum(frame.total for frame in frames if frame.depth == 0)
    drawn = [frame for frame in frames if frame.total * LEAST >= whole]
    if not drawn:
        return ["<p>Nothing was counted.</p>"]
    height = ROW * (1 + max(frame.depth for frame in drawn))
    left_out = len(frames) - len(drawn)
    key = (
        f'<span><i style="background:{colour}"></i>{phase}</span>'
        for phase, colour in COLOURS.items()
        if any(frame.amounts.get(phase) for frame in drawn)
    )
    return [
        "<p>Each module is as wide as its amount, and the modules inside it are below it; width "
        "with nothing below is the module's own. Click a module to zoom in.</p>",
        f'<p class="key">{"".join(key)}</p>',
        f'<div class="flame" style="height:{height}px">',
        *(_frame(frame, whole, show) for frame in drawn),
        '</div><p class="said"></p>',
        *([f"<p>Too narrow to draw, and left out: {left_out}.</p>"] if left_out else []),
    ]


def _frame(frame: Frame, whole: int, show: Callable[[int], str]) -> str:
    at, part = frame.start / whole, frame.total / whole
    name = frame.name or "(outside)"
    words = [f"{phase} {show(n)}" for phase, n in frame.amounts.items() if phase]
    more = ", ".join([*words, f"itself {show(frame.own)}"])
    said = f"{name}: {show(frame.total)}, {part:.1%} ({more})"
    stops, done = [], 0
    for phase, amount in frame.amounts.items():
        ends = (100 * done / frame.total, 100 * (done + amount) / frame.total)
        stops += [f"{COLOURS.get(phase, COLOURS['forward'])} {end:.2f}%" for end in ends]
        done += amount
    return (
        f'<button data-at="{at:.9f}" data-part="{part:.9f}" title="{escape(said)}" style="'
        f"left:{100 * at:.6f}%;width:{100 * part:.6f}%;top:{ROW * frame.depth}px;"
        f'background:linear-gradient(90deg,{",".join(stops)})">{escape(frame.label)}'
        "</button>"
    )
