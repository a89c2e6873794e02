"""Draw tokens per second against peak memory as an SVG image, without overlapping labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

WIDTH, PANEL_HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 34, 52
HEADER = 60
FONT, CHARACTER, LINE = 13, 7.4, 16
MARK = 5.0

_STYLE = """
  text { font: 13px sans-serif; fill: #222 } .title { font-weight: bold; font-size: 16px }
  .small { fill: #666 } .axis { stroke: #888; fill: none } .grid { stroke: #ddd }
  .ours { fill: #3949ab } .theirs { fill: #b0651d } .lead { stroke: #999; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .small { fill: #aaa } .grid { stroke: #333 }
    .ours { fill: #8c9eff } .theirs { fill: #e6a15c }
  }
"""


@dataclass(frozen=True)
class Point:
    """One way: its peak in GiB and its tokens per second."""

    label: str
    peak_gib: float
    tokens_per_second: float
    is_ours: bool


@dataclass(frozen=True)
class Panel:
    """The ways of one model and batch shape."""

    title: str
    points: Sequence[Point]


class Box(NamedTuple):
    """A rectangle of the image."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Whether the boxes share more than an edge."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def is_inside(self, other: Box) -> bool:
        """Whether the box lies within another one."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.top >= other.top
            and self.bottom <= other.bottom
        )


def place_labels(
    marks: Sequence[tuple[float, float]], labels: Sequence[str], room: Box
) -> list[Box]:
    """Choose a box for each label without overlaps with labels, marks or the edges of the room.

    Boxes are near their marks if possible; otherwise the first free place is taken.

    Raises:
        ValueError: the labels do not fit into the room.
    """
    taken = [Box(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in marks]
    boxes = []
    for (x, y), label in zip(marks, labels, strict=True):
        width = CHARACTER * len(label)
        for box in _candidates(x, y, width, room):
            if box.is_inside(room) and not any(map(box.overlaps, taken)):
                break
        else:
            raise ValueError(f"no room is left for the label {label!r}")
        taken.append(box)
        boxes.append(box)
    return boxes


def _candidates(x: float, y: float, width: float, room: Box) -> Iterator[Box]:
    """Yield boxes around a mark, the nearest first; then boxes all over the room."""
    for distance in (MARK + 3, 18, 30, 45, 60, 80):
        for step in range(16):
            angle = 2 * math.pi * step / 16
            dx, dy = distance * math.cos(angle), distance * math.sin(angle)
            left = x + dx - (width if math.cos(angle) < -0.1 else 0)
            if abs(math.cos(angle)) <= 0.1:
                left = x - width / 2
            yield Box(left, y + dy - LINE / 2, left + width, y + dy + LINE / 2)
    top = room.top
    while top + LINE <= room.bottom:
        left = room.left
        while left + width <= room.right:
            yield Box(left, top, left + width, top + LINE)
            left += 10
        top += LINE / 2


def draw(title: str, about: str, panels: Sequence[Panel]) -> str:
    """Return the image as text.

    Args:
        title: the first line.
        about: the second line: card, date and versions.
        panels: drawn from top to bottom.
    """
    height = HEADER + PANEL_HEIGHT * len(panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="10" y="24" class="title">{escape(title)}</text>',
        f'<text x="10" y="46" class="small">{escape(about)}</text>',
        '<text x="10" y="62" class="small">Circles: this project; squares: others. '
        "Upper left is better.</text>",
    ]
    for index, panel in enumerate(panels):
        lines += _panel(panel, HEADER + PANEL_HEIGHT * index)
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, top: float) -> Iterator[str]:
    room = Box(LEFT, top + TOP, WIDTH - RIGHT, top + PANEL_HEIGHT - BOTTOM)
    yield f'<text x="10" y="{top + 18}" class="small">{escape(panel.title)}</text>'
    yield f'<path class="axis" d="M{room.left} {room.top}V{room.bottom}H{room.right}"/>'
    yield (
        f'<text x="{room.right}" y="{room.bottom + 38}" text-anchor="end" class="small">'
        "peak memory of a whole step, GiB; vertical: tokens per second</text>"
    )
    if not panel.points:
        return
    across = _Axis([one.peak_gib for one in panel.points], room.left, room.right)
    upward = _Axis([one.tokens_per_second for one in panel.points], room.bottom, room.top)
    for value in across.ticks:
        x = across.at(value)
        yield (
            f'<text x="{x:.1f}" y="{room.bottom + 18}" text-anchor="middle" class="small">'
            f"{value:g}</text>"
        )
    for value in upward.ticks:
        y = upward.at(value)
        yield f'<path class="grid" d="M{room.left} {y:.1f}H{room.right}"/>'
        yield (
            f'<text x="{room.left - 6}" y="{y + 4:.1f}" text-anchor="end" class="small">'
            f"{value:,g}</text>"
        )
    marks = [(across.at(one.peak_gib), upward.at(one.tokens_per_second)) for one in panel.points]
    boxes = place_labels(marks, [one.label for one in panel.points], room)
    for one, (x, y), box in zip(panel.points, marks, boxes, strict=True):
        yield from _labelled(one, x, y, box)


def _labelled(point: Point, x: float, y: float, box: Box) -> Iterator[str]:
    kind = "ours" if point.is_ours else "theirs"
    end_x, end_y = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
    if math.hypot(end_x - x, end_y - y) > 2 * MARK:
        yield f'<path class="lead" d="M{x:.1f} {y:.1f}L{end_x:.1f} {end_y:.1f}"/>'
    if point.is_ours:
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{MARK}"/>'
    else:
        yield (
            f'<rect class="{kind}" x="{x - MARK:.1f}" y="{y - MARK:.1f}" '
            f'width="{2 * MARK}" height="{2 * MARK}"/>'
        )
    yield (
        f'<text class="label" x="{(box.left + box.right) / 2:.1f}" '
        f'y="{box.bottom - 4:.1f}" text-anchor="middle">{escape(point.label)}</text>'
    )


class _Axis:
    """Maps values to positions, with a margin around the least and the largest."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        low, high = min(values), max(values)
        margin = 0.12 * (high - low) or 0.1 * high or 1.0
        self._low, self._high = max(0.0, low - margin), high + margin
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        """Return the position of a value."""
        share = (value - self._low) / (self._high - self._low)
        return self._first + share * (self._last - self._first)

    @property
    def ticks(self) -> list[float]:
        """Return round values along the axis."""
        rough = (self._high - self._low) / 6
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * one for one in (1, 2, 5, 10) if unit * one >= rough)
        count = range(math.ceil(self._low / step), math.floor(self._high / step) + 1)
        return [round(step * one, 10) for one in count]
