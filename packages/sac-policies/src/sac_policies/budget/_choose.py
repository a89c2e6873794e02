"""The solver: choose one option for each part, at the least cost within a limit of bytes.

Parts are taken in order. From part to part all pairs (bytes so far, cost so far) are kept that no
other pair dominates; of too many, one for each of some equal steps of bytes. The result is then
near the optimum, and always within the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_MOST, _LEAST = 500, 100
"""Pairs that are kept after a part."""
_WORK = 100_000
"""Pairs that are kept in all, about."""


class Option(NamedTuple):
    """One option of a part.

    Attributes:
        grown: bytes that it adds.
        cost: its cost.
        room: most bytes before it.
    """

    grown: int
    cost: int
    room: int


def cheapest(parts: Sequence[Sequence[Option]], *, start: int, limit: int) -> list[int] | None:
    """Return the number of an option for each part; None if nothing fits.

    Args:
        parts: options of each part.
        start: bytes before the first part.
        limit: most bytes after the last part.

    Example:
        >>> keep, again = Option(8, 0, 2), Option(0, 5, 10)
        >>> cheapest([[keep, again]] * 3, start=0, limit=10)
        [1, 1, 0]
    """
    most = max(_LEAST, min(_MOST, _WORK // max(1, len(parts))))
    states: list[tuple[int, int, Any]] = [(start, 0, None)]
    for options in parts:
        found = [
            (now + each.grown, spent + each.cost, (number, before))
            for number, each in enumerate(options)
            for now, spent, before in states
            if now <= each.room
        ]
        states = _front(found, most)
    states = [state for state in states if state[0] <= limit]
    if not states:
        return None
    chosen = []
    path = min(states, key=lambda state: state[1])[2]
    while path is not None:
        number, path = path
        chosen.append(number)
    return chosen[::-1]


def _front(found: list[tuple[int, int, Any]], most: int) -> list[tuple[int, int, Any]]:
    """Drop dominated states; of equal ones the first stays, whose earlier parts add less."""
    front: list[tuple[int, int, Any]] = []
    for state in sorted(found, key=lambda state: state[:2]):
        if not front or state[1] < front[-1][1]:
            front.append(state)
    if len(front) <= most:
        return front
    step = max(1, (front[-1][0] - front[0][0]) // most)
    return list({state[0] // step: state for state in front}.values())
