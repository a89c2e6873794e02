"""A flame chart by module as one self-contained HTML page.

A frame is a module on one path, drawn below its caller. Its width is its amount, including the
modules inside it. The part of a frame with nothing below it is the module's own amount.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
"""Colours of phases that colour-blind readers can tell apart."""

LEAST = 2000
"""Frames narrower than this part of the whole are not drawn."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d5d8dc }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #16181b; --line: #3a3e44 } }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1100px;
  padding: 0 1rem; color: var(--ink); background: var(--paper) }
h1 { font-size: 1.3rem }
pre { overflow-x: auto; font-size: 12px }
.key span { display: inline-block; margin-right: 1rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
.flame, .inside { display: flex; align-items: flex-start }
.flame { border-top: 1px solid var(--line) }
.frame { min-width: 0; overflow: hidden }
.frame.hidden { display: none }
.frame button { width: 100%; height: 19px; padding: 0 3px; border: 0; border-radius: 2px;
  font: 12px/19px system-ui, sans-serif; text-align: left; color: #111; overflow: hidden;
  white-space: nowrap; cursor: pointer; box-shadow: inset -1px 0 var(--paper) }
.frame button:focus-visible { outline: 2px solid var(--ink) }
p.said { min-height: 1.45em; font-variant-numeric: tabular-nums }
"""

# A click on a frame hides its siblings and those of its parents; a second click shows them.
SCRIPT = """
const chart = document.querySelector('.flame'), said = document.querySelector('.said');
const say = event => { if (event.target.title) said.textContent = event.target.title; };
chart?.addEventListener('mouseover', say); chart?.addEventListener('focusin', say);
chart?.addEventListener('click', event => {
  const frame = event.target.closest('.frame'), again = frame?.classList.contains('wide');
  if (!frame) return;
  for (const each of chart.querySelectorAll('.frame')) each.classList.remove('hidden', 'wide');
  if (again) return;
  frame.classList.add('wide');
  for (let at = frame; at !== chart; at = at.parentElement)
    for (const beside of at.parentElement.querySelectorAll(':scope > .frame'))
      if (beside !== at) beside.classList.add('hidden');
});
"""


class Frame:
    """A module where it was called, with its amounts by phase and the frames below it by name."""

    def __init__(self) -> None:
        self.amounts: Amounts = {}
        self.inside: dict[str, Frame] = {}

    def add(self, stack: Stack, amounts: Mapping[str, int]) -> None:
        """Add amounts to this frame and to the frames of `stack` below it."""
        for phase, amount in amounts.items():
            self.amounts[phase] = self.amounts.get(phase, 0) + amount
        if stack:
            self.inside.setdefault(stack[0], Frame()).add(stack[1:], amounts)

    @property
    def total(self) -> int:
        """Amount in all phases: the frame's width."""
        return sum(self.amounts.values())

    @property
    def own(self) -> int:
        """Amount of the module itself."""
        return self.total - sum(frame.total for frame in self.inside.values())


def flame_page(
    title: str, stacks: Mapping[Stack, Amounts], show: Callable[[int], str], *, table: str = ""
) -> str:
    """Return the page.

    Args:
        title: title of the page.
        stacks: amounts by stack and phase.
        show: formats an amount with its unit.
        table: text below the chart.
    """
    whole = Frame()
    for stack, amounts in stacks.items():
        whole.add(stack or ("",), amounts)
    parts = [f"<h1>{escape(title)}</h1>", *_chart(whole, show)]
    parts += [f"<pre>{escape(table)}</pre>"] if table else []
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>"
        + "\n".join(parts)
        + f"\n<script>{SCRIPT}</script></body></html>\n"
    )


def _chart(whole: Frame, show: Callable[[int], str]) -> list[str]:
    if not whole.total:
        return ["<p>Nothing was counted.</p>"]
    key = (
        f'<span><i style="background:{colour}"></i>{phase}</span>'
        for phase, colour in COLOURS.items()
        if whole.amounts.get(phase)
    )
    return [
        "<p>Each module is as wide as its amount, and the modules inside it are below it; width "
        "with nothing below is the module's own. Click a module to zoom in.</p>",
        f'<p class="key">{"".join(key)}</p>',
        f'<div class="flame">{_inside(whole, "", whole.total, show)}</div><p class="said"></p>',
    ]


def _inside(parent: Frame, around: str, whole: int, show: Callable[[int], str]) -> str:
    drawn = {n: each for n, each in parent.inside.items() if 0 < whole <= each.total * LEAST}
    rest = parent.total - sum(frame.total for frame in drawn.values())
    frames = [_frame(name, around, frame, whole, show) for name, frame in drawn.items()]
    return "".join([*frames, f'<div class="frame" style="flex:{_width(rest, whole)} 0 0"></div>'])


def _width(amount: int, whole: int) -> int:
    return round(1_000_000 * amount / whole)


def _frame(name: str, around: str, frame: Frame, whole: int, show: Callable[[int], str]) -> str:
    label = name.removeprefix(f"{around}.") or "(outside)"
    words = [f"{phase} {show(n)}" for phase, n in frame.amounts.items() if phase and n]
    more = ", ".join([*words, f"itself {show(frame.own)}"])
    said = f"{name or label}: {show(frame.total)}, {frame.total / whole:.1%} ({more})"
    stops, done = [], 0
    for phase in sorted(frame.amounts, key=[*COLOURS, ""].index):
        ends = (100 * done / frame.total, 100 * (done + frame.amounts[phase]) / frame.total)
        stops += [f"{COLOURS.get(phase, COLOURS['forward'])} {end:.2f}%" for end in ends]
        done += frame.amounts[phase]
    return (
        f'<div class="frame" style="flex:{_width(frame.total, whole)} 0 0">'
        f'<button title="{escape(said)}" style="background:linear-gradient(90deg,'
        f'{",".join(stops)})">{escape(label)}</button>'
        f'<div class="inside">{_inside(frame, name, whole, show)}</div></div>'
    )
