"""All plans for a few values, but for those that bounds rule out (`_bounds`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ._bounds import ONE, Prices, Values
from ._copies import Stream

_NODES = 20_000
"""Decisions that are made before the search gives up."""


class _Node(NamedTuple):
    """What is decided about the first items.

    Attributes:
        at: how many they are.
        room: bytes that may still be kept.
        copied: nanoseconds of copies one way.
        spent: that, and work repeated.
        stream: copies out; of items of several calls, those of the first.
        kept: which items are kept.
        away: which are offloaded.
    """

    at: int
    room: int
    copied: int
    spent: int
    stream: Stream
    kept: tuple[int, ...]
    away: tuple[int, ...]


class Tree:
    """All plans, one item decided after another, but for those that bounds rule out.

    Attributes:
        cost: of the best plan.
        kept: items that it keeps, where it is better than the one that was known.
        away: items that it offloads.
    """

    def __init__(self, values: Values, prices: Sequence[Prices], cost: int) -> None:
        self.cost = cost
        self.kept: tuple[int, ...] = ()
        self.away: tuple[int, ...] = ()
        self._values, self._nodes = values, 0
        self._bounds = [(each, _sums_from(values.least(each))) for each in prices]

    def ends(self) -> bool:
        """Look for better plans; tell whether there are no others."""
        values = self._values
        # With the largest value of all nobody waits for longer than with those that are taken.
        stream = Stream(values.copies, max(values.sizes))
        todo = [_Node(0, values.capacity, 0, 0, stream, (), ())]
        while todo and self._nodes < _NODES:
            node = todo.pop()
            self._nodes += 1
            if node.at == len(values.items):
                self._consider(node)
            elif not self._is_ruled_out(node):
                todo += self._after(node)
        return not todo

    def _consider(self, node: _Node) -> None:
        values = self._values
        cost = node.spent - node.copied + values.waits(node.away)
        if cost < self.cost:
            self.cost, self.kept, self.away = cost, node.kept, node.away

    def _is_ruled_out(self, node: _Node) -> bool:
        values, stream, at = self._values, node.stream, node.at
        copies = values.copies
        # Of copies to come, no more is hidden than from now on, after those that are under way.
        behind = stream.behind(values.items[at - 1].ops[0]) if at else 0
        hidden = values.hidden[max(0, at - 1)] - behind
        sunk = node.spent + copies.regions * stream.waited
        return any(
            sunk * ONE + least[at] - prices.kept * node.room - prices.out * hidden
            > (self.cost - 1) * ONE
            for prices, least in self._bounds
        )

    def _after(self, node: _Node) -> list[_Node]:
        """Nodes with one more item decided, the likeliest last."""
        values, n = self._values, node.at
        size, copied = values.sizes[n], values.copy[n]
        stream = node.stream.fork()
        stream.copy(values.items[n].ops[0])
        repeats = node._replace(at=n + 1, spent=node.spent + values.repeat[n])
        copies = node._replace(
            at=n + 1,
            copied=node.copied + copied,
            spent=node.spent + copied,
            stream=stream,
            away=(*node.away, n),
        )
        if size > node.room:
            return [repeats, copies]
        return [
            repeats,
            copies,
            node._replace(at=n + 1, room=node.room - size, kept=(*node.kept, n)),
        ]


def _sums_from(numbers: Sequence[int]) -> list[int]:
    """Sum of the numbers from each on; of none, last."""
    return list(accumulate(reversed(numbers), initial=0))[::-1]
