"""Predict memory of a region whose neighbours offload other values than in the measured step.

In backward a region requests the values of the preceding region that offloads; the last region also
requests its own values. Unread values are requested in the measured step only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ._measure import Interval


class _Level:
    """A step in which all regions that can offload are on one level.

    Attributes:
        order: numbers of the regions that offload; empty if one is called several times, since
            its neighbours are then unknown.
        asked: requested bytes by region.
        unread: bytes by region that were requested and not read.
        values: bytes of each region that the following region requests.
    """

    def __init__(self, intervals: Sequence[Interval]) -> None:
        own = [each for each in intervals if isinstance(each.key, tuple)]
        begun = [each for each in own if each.moved.out]
        self.order: list[int] = [each.key[0] for each in begun]
        if len(set(self.order)) < len(self.order):
            self.order = []
        moved = {each.key[0]: each.moved for each in own if each.key[2]}
        self.asked = {n: moved[n].back if n in moved else 0 for n in self.order}
        self.unread = {n: moved[n].unread if n in moved else 0 for n in self.order}
        self.values = {
            before: self.asked[number] - self.unread[before]
            for before, number in pairwise(self.order)
        }
        if self.order:  # the last region requests its own values too
            *before, last = self.order[-2:]
            both = self.asked[last] - sum(self.unread[n] for n in self.order[-2:])
            sizes = [each.moved.out for each in begun[-2:]]
            self.values[last] = both * sizes[-1] // sum(sizes)
            self.values.update(dict.fromkeys(before, both - self.values[last]))


class Offloaded:
    """Steps on single levels, in which regions offload.

    Args:
        measured: by level, the intervals of a step; keys as in `marked`.
    """

    def __init__(self, measured: Sequence[Sequence[Interval]]) -> None:
        self._levels = [_Level(intervals) for intervals in measured]
        keys = (each.key for each in measured[0] if isinstance(each.key, tuple))
        self._order = list(dict.fromkeys(number for number, *_ in keys))

    def among(self, choice: Sequence[int], measured: Interval) -> Interval:
        """Predict an interval of a region when other regions are on other levels.

        Args:
            choice: level of each region.
            measured: the measured interval, with all regions on this region's level.
        """
        number, is_backward = measured.key[0], measured.key[2]
        level = self._levels[choice[number]]
        if number not in level.order or not is_backward:
            return measured
        others = [n for n in self._order if n in self._levels[choice[n]].order]
        at = others.index(number)
        more = -level.asked[number]
        if at:
            before = others[at - 1]
            more += self._levels[choice[before]].values[before]
        if number == others[-1]:
            more += level.values[number]
        grown = measured.grown + more + level.unread[number]
        return replace(measured, grown=grown, most=max(0, measured.most + more))
