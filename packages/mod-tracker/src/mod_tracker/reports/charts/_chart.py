"""What a chart shows: frames of modules, how numbers are written, and memory over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ._flame import Frame
from ._memory_line import MemoryLine

Show = Callable[[int], str]
"""Writes a number with its unit."""

LEAST = 2000
"""Frames narrower than this part of the whole are not drawn."""


@dataclass(frozen=True)
class Chart:
    """A flame chart, and memory over time where it is known.

    Attributes:
        title: what the amounts are.
        frames: outer ones before inner ones; see `frames_of`.
        show: writes an amount.
        show_time: writes nanoseconds.
        show_bytes: writes bytes.
        line: memory over time.
        notes: what a reader has to know.
    """

    title: str
    frames: tuple[Frame, ...]
    show: Show
    show_time: Show
    show_bytes: Show
    line: MemoryLine | None = None
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> int:
        """Amount of all frames."""
        return sum(frame.total for frame in self.frames if frame.depth == 0)

    @property
    def drawn(self) -> list[Frame]:
        """Frames that are wide enough to be seen."""
        return [frame for frame in self.frames if frame.total * LEAST >= self.whole]
