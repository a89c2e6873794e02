"""What a region takes whose neighbours do not offload as well: it asks for values of theirs.

In backward a region asks for the values of the one before it that offloads, and the first one asks
for its own, too. What regions ask for in vain they learn in the step that is measured: none does
later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ._measure import Interval


class Offloaded:
    """A step in which every region offloads that can.

    Args:
        level: the one that all regions were on.
        intervals: what was measured; keys as `marked` gives them.
    """

    def __init__(self, level: int, intervals: Sequence[Interval]) -> None:
        self._level = level
        own = [each for each in intervals if isinstance(each.key, tuple)]
        begun = [each for each in own if each.moved.out]
        self._order: list[int] = [each.key[0] for each in begun]
        if len(set(self._order)) < len(self._order):
            self._order = []  # called again: whose neighbour is whose is not known
        self._back = {each.key[0]: each.moved for each in own if each.key[2]}
        self._values: dict[int | None, int] = {
            before: self._asked(number) - self._unread(before)
            for before, number in pairwise(self._order)
        }
        if self._order:  # the last has asked for its own with those of the one before
            *before, last = self._order[-2:]
            both = self._asked(last) - sum(map(self._unread, self._order[-2:]))
            sizes = [each.moved.out for each in begun[-2:]]
            self._values[last] = both * sizes[-1] // sum(sizes)
            self._values.update(dict.fromkeys(before, both - self._values[last]))

    def among(self, choice: Sequence[int], measured: Interval) -> Interval:
        """An interval of a region that is on this level, where others may be on others.

        Args:
            choice: by region, its level.
            measured: where all are on this one.
        """
        number, backward = measured.key[0], measured.key[2]
        if number not in self._order or backward is None:
            return measured
        others = [other for other in self._order if choice[other] == self._level]
        earlier = _before(number, others)
        if not backward:
            return measured
        more = self._values.get(earlier, 0) - self._asked(number)
        if number == others[-1]:
            more += self._values.get(number, 0)
        grown = measured.grown + more + self._unread(number)
        return replace(measured, grown=grown, most=max(0, measured.most + more))

    def _asked(self, number: int) -> int:
        return self._back[number].back if number in self._back else 0

    def _unread(self, number: int) -> int:
        return self._back[number].unread if number in self._back else 0


def _before(number: int, order: Sequence[int]) -> int | None:
    at = order.index(number)
    return order[at - 1] if at else None
