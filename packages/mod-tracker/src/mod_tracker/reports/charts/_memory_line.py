"""Bytes alive over time, by the module that allocated them.

Note [Areas]
    Modules are many, and colours few. An area is a module with those inside it; the largest area
    is divided into the modules inside it, and again, as long as there are no more areas than
    colours. What a divided module holds itself stays in its own area, and so do the smallest
    modules inside it where there are more of them than colours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ._flame import Stack

Change = tuple[int, Stack, int]
"""Nanoseconds, the module that allocated, and bytes that came to be alive then, or are gone."""

AREAS = 10
STEPS = 800  # moments that are drawn


@dataclass(frozen=True)
class Area:
    """Bytes of one module, and of modules inside it that have no area of their own.

    Attributes:
        name: of the module, "" for the outside.
        live: bytes alive at each moment of the line.
        peak: most of these at any moment, drawn or not.
    """

    name: str
    live: tuple[int, ...]
    peak: int


@dataclass(frozen=True)
class MemoryLine:
    """What is drawn.

    Attributes:
        moments: nanoseconds since the start, at most 800; of each span of time its fullest one.
        areas: in the order in which they first held something; sums are the bytes alive.
        phases: nanoseconds since the start and the phase that runs from then on.
        end: nanoseconds from start to end.
        peak: most bytes alive at any moment.
    """

    moments: tuple[int, ...]
    areas: tuple[Area, ...]
    phases: tuple[tuple[int, str], ...]
    end: int
    peak: int


def memory_line(
    changes: Sequence[Change], phases: Sequence[tuple[int, str]], *, steps: int = STEPS
) -> MemoryLine:
    """Add changes up, given in the order of time.

    Args:
        changes: at least one.
        phases: nanoseconds, and the phase that runs from then on; the last one ends the line.
        steps: moments at most.
    """
    start = min(changes[0][0], *(at for at, _ in phases))
    end = max(changes[-1][0], *(at for at, _ in phases)) - start
    names = _areas(changes)
    live: Counter[Stack] = Counter()
    peaks: Counter[Stack] = Counter()
    width = max(1, -(-(end + 1) // steps))
    total = peak = 0
    fullest: dict[int, tuple[int, int, Counter[Stack]]] = {}
    for at, stack, size in changes:
        area = names[stack]
        live[area] += size
        total += size
        peaks[area] = max(peaks[area], live[area])
        peak = max(peak, total)
        span = (at - start) // width
        if span not in fullest or total >= fullest[span][0]:
            fullest[span] = (total, at - start, live.copy())
    drawn = [fullest[span][1:] for span in sorted(fullest)]
    order = list(dict.fromkeys(names[stack] for _, stack, _ in changes))
    return MemoryLine(
        moments=tuple(at for at, _ in drawn),
        areas=tuple(
            Area(area[-1] if area else "", tuple(held[area] for _, held in drawn), peaks[area])
            for area in order
        ),
        phases=_joined(phases, start),
        end=end,
        peak=peak,
    )


def _joined(phases: Sequence[tuple[int, str]], start: int) -> tuple[tuple[int, str], ...]:
    joined: list[tuple[int, str]] = []
    for at, phase in phases:
        if not joined or joined[-1][1] != phase:
            joined.append((at - start, phase))
    return tuple(joined)


def _areas(changes: Sequence[Change]) -> dict[Stack, Stack]:
    """The area of every stack. See Note [Areas]."""
    sizes: Counter[Stack] = Counter()
    for _, stack, size in changes:
        sizes[stack] += max(size, 0)
    areas: dict[Stack, set[Stack]] = {}
    for stack in sizes:
        areas.setdefault(stack[:1], set()).add(stack)
    whole = set(areas)  # those that may still be divided
    while whole:
        largest = max(whole, key=lambda area: sum(sizes[stack] for stack in areas[area]))
        whole.remove(largest)
        parts: dict[Stack, set[Stack]] = {}
        for stack in areas[largest]:
            parts.setdefault(stack[: len(largest) + 1], set()).add(stack)
        own = parts.pop(largest, set())
        by_size = sorted(parts, key=lambda part: -sum(sizes[stack] for stack in parts[part]))
        room = AREAS - (len(areas) - 1)
        if len(parts) + bool(own) > room:
            for part in by_size[room - 1 :]:
                own |= parts.pop(part)
        if parts:
            del areas[largest]
            areas.update(parts)
            whole.update(parts)
            if own:
                areas[largest] = own
    return {stack: area for area, stacks in areas.items() for stack in stacks}
