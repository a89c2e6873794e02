"""Cuts of a buffer into contiguous ranges, of which the longest is as short as possible.

A range begins at an atom of a parameter (see `_boundary`) or where a parameter ends. For a given
limit, a greedy pass needs the fewest ranges, so a binary search finds the smallest limit. Ranges
inside one parameter have one length, and are counted instead of walked: the cost depends on
parameters, not on ranks. The longest range exceeds the mean by less than the largest atom and the
gap before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ._layout import FlatLayout


@dataclass(frozen=True)
class CutPlaces:
    """Positions where ranges of a buffer may begin.

    Args:
        layout: the buffer.
        atoms: for each parameter, elements that stay together.
    """

    layout: FlatLayout
    atoms: Sequence[int]

    def last_before(self, position: int) -> int:
        """The last place at or before `position` where a range may begin."""
        layout = self.layout
        if position >= layout.numel:
            return layout.numel
        index = bisect_right(layout.offsets, position) - 1
        offset, numel = layout.offsets[index], layout.specs[index].numel
        within = position - offset
        return offset + (numel if within >= numel else within - within % self.atoms[index])

    def runs(self, limit: int) -> Iterator[tuple[int, int, int]]:
        """`(start, length, count)` of consecutive ranges of at most `limit` elements.

        They end before the buffer does if an atom is longer than the limit.
        """
        start, total = 0, self.layout.numel
        while start < total:
            length = self.last_before(start + limit) - start
            if length <= 0:
                return
            count = 1 + self._alike(start, length, limit)
            yield start, length, count
            start += length * count

    def _alike(self, start: int, length: int, limit: int) -> int:
        """How many following ranges in the same parameter have the same length."""
        index = bisect_right(self.layout.offsets, start) - 1
        stop = start + length
        end = self.layout.offsets[index] + self.layout.specs[index].numel
        room = end - limit - stop
        return 0 if room <= 0 else (room - 1) // length + 1

    def needed(self, limit: int) -> int | None:
        """How many ranges of at most `limit` elements cover the buffer; None if impossible."""
        ranges, end = 0, 0
        for start, length, count in self.runs(limit):
            ranges, end = ranges + count, start + length * count
        return ranges if end >= self.layout.numel else None

    def shortest_longest(self, world_size: int) -> int:
        """The smallest possible length of the longest of `world_size` ranges."""
        low, high = -(-self.layout.numel // world_size), self.layout.numel
        while low < high:
            guess = (low + high) // 2
            needed = self.needed(guess)
            if needed is not None and needed <= world_size:
                high = guess
            else:
                low = guess + 1
        return high

    def ranges(self, world_size: int) -> Iterator[tuple[int, int]]:
        """Return `(start, stop)` per rank; ranks beyond the data have empty ranges at the end."""
        made = 0
        for start, length, count in self.runs(self.shortest_longest(world_size)):
            yield from ((start + length * i, start + length * (i + 1)) for i in range(count))
            made += count
        end = self.layout.numel
        yield from ((end, end) for _ in range(world_size - made))
