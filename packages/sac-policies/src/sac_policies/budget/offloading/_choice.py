"""Finds a plan, and says how much better any plan can be.

A byte that is kept and a byte whose copy nobody waits for save the same work. So both kinds of room
together are one knapsack: take what is dearest to repeat for its bytes. How the taken values divide
into kept and offloaded ones costs nothing as long as nobody waits. They are divided in the order of
the forward: offloaded where nobody waits for the copy, and of the others the dearest are kept.

Rule 1. Few values are tried in all ways that bounds leave open, and then the plan is optimal.
Rule 2. Effort is counted in values looked at, never in time: one trace has one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from .._knapsack import Packing
from .._trace import Item
from ._bounds import ONE, Prices, Solver, Values
from ._copies import Copies, Stream
from ._tree import Tree

_NEAR = 1e-5
"""A gap at which no better plan is looked for."""
_SHARES = (0.5, 1.0, 2.0)
"""Of the price down to which the bound takes values: down to where they are divided."""
_LOOKS = 100_000
"""Values that are looked at while decisions are changed one by one."""
_FEW = 40
"""Values that are tried in all ways."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of each item.

    Attributes:
        kept: numbers of those that are kept, ascending.
        away: of those that are offloaded, ascending; all others are repeated.
        waits: nanoseconds that all regions together wait for copies.
        bound: no choice costs less, in waits and in work repeated by all regions together.
    """

    kept: tuple[int, ...]
    away: tuple[int, ...]
    waits: int
    bound: int


def choose(items: Sequence[Item], copies: Copies, *, capacity: int, solver: Solver) -> Choice:
    """Choose what to keep, repeat and offload so that regions repeat and wait the least.

    Args:
        items: what is chosen from; costs in nanoseconds.
        copies: of the operators that the items are of.
        capacity: bytes that may be kept; int >= 0.
        solver: as `pack`.
    """
    search = _Search(Values(items, copies, capacity), solver)
    if items:
        search.divide()
        search.change()
        search.try_all()
    kept, away = (tuple(sorted(each)) for each in (search.kept, search.away))
    return Choice(kept, away, search.values.waits(away), min(search.bound, search.cost))


class _Search:
    """The best plan so far, and how good any plan can be.

    Attributes:
        values: what is decided about.
        kept: items that the best plan keeps.
        away: items that it offloads.
        cost: of the best plan.
        bound: no plan costs less.
        prices: two kinds, at which bounds are near what the best plan costs.
        price: of a byte, down to which the bound takes values.
    """

    def __init__(self, values: Values, solver: Solver) -> None:
        self.values, self._solver = values, solver
        self.kept: set[int] = set()
        self.away: set[int] = set()
        self.cost = sum(values.repeat)
        self.bound, self.price = 0, values.byte_ns
        self.prices: list[Prices] = []
        if values.items:
            self._find_bound()

    def _find_bound(self) -> None:
        """With waiting free, and at the price at which all that can be hidden is used up."""
        values, regions = self.values, self.values.copies.regions
        free = [min(pair) for pair in zip(values.repeat, values.copy, strict=True)]
        price = int(values.density(values.capacity, free) * ONE)
        self.prices.append(Prices(0, price))
        found = [values.bound_of_kept(self._solver)]
        room = values.capacity + values.hidden[0] / values.byte_ns
        dearest = values.density(room, values.repeat) / values.byte_ns - 1
        out = max(0, min(int(dearest * ONE), regions * ONE))
        if out:
            self.price = (ONE + out) / ONE * values.byte_ns
            self.prices.append(Prices(out, int(self.price * ONE)))
            found.append(values.bound(self.prices[-1]))
        self.bound = max(0, *found)

    @property
    def _is_near(self) -> bool:
        return self.cost - self.bound <= _NEAR * self.cost

    def divide(self) -> None:
        """Take values down to some price, and divide them; the same for several prices."""
        best = self._tried(set())
        for share, forced in product(_SHARES, (False, True)):
            if not self._is_near:
                best = min(best, self._tried(self._passed(share, forced)))
        self._consider(*self._filled(set(best[1]), self._solver))

    def _tried(self, away: set[int]) -> tuple[int, list[int]]:
        return self._consider(*self._filled(away, _fill)), sorted(away)

    def _passed(self, share: float, forced: bool) -> set[int]:
        """Offload in the order of the forward what nobody waits for.

        How far copies may fall behind depends on the largest value that is taken. Either the first
        one of the largest is `forced`, or where none is taken, smaller ones are passed again.
        """
        values, sizes = self.values, self.values.sizes
        price = max(share * self.price, values.byte_ns)
        offered = [
            n
            for n in values.all
            if values.repeat[n] >= price * sizes[n] and len(values.items[n].ops) == 1
        ]
        while True:
            most = max((sizes[n] for n in offered), default=0)
            stream, found = Stream(values.copies, most), set[int]()
            first = next((n for n in offered if forced and sizes[n] == most), None)
            for n in offered:
                if stream.copy(values.items[n].ops[0], at_most=None if n == first else 0):
                    found.add(n)
            largest = max((sizes[n] for n in found), default=0)
            if largest == most:
                return found
            offered = [n for n in offered if sizes[n] <= largest]

    def _filled(self, away: set[int], solver: Solver) -> tuple[set[int], set[int]]:
        """Keep what is worth most; of what is offloaded, that is its copy. Offload of the rest what
        takes less time to wait for than to repeat.
        """
        values = self.values
        worth = [
            values.copy[n] if n in away else min(values.repeat[n], values.exposed[n])
            for n in values.all
        ]
        kept = set(solver(values.sizes, worth, capacity=values.capacity).taken)
        exposed = {n for n in values.all if values.exposed[n] < values.repeat[n]}
        return kept, (away | exposed) - kept

    def _consider(self, kept: set[int], away: set[int]) -> int:
        """Take a plan if it costs less than the best so far; return what it costs."""
        values = self.values
        cost = sum(values.repeat[n] for n in values.all if n not in kept and n not in away)
        cost += values.waits(away)
        if cost < self.cost:
            self.kept, self.away, self.cost = kept, away, cost
        return cost

    def change(self) -> None:
        """Decide otherwise about single items while that costs less."""
        values, looks, before = self.values, _LOOKS, self.cost + 1
        dearest = sorted(values.all, key=lambda n: -values.repeat[n])
        while self.cost < before and not self._is_near:
            before = self.cost
            for n in dearest:
                kept, away = self.kept - {n}, self.away - {n}
                ways = [(kept, away), (kept, away | {n})]
                if n not in self.kept and values.fits(kept | {n}):
                    ways.append((kept | {n}, away))
                for way in ways:
                    looks -= len(values.all) + len(way[1])
                    self._consider(*way)
                if looks < 0:
                    return

    def try_all(self) -> None:
        """Try all ways that bounds leave open, where items are few enough (Rule 1)."""
        if len(self.values.items) <= _FEW and self.cost != self.bound:
            tree = Tree(self.values, self.prices, self.cost)
            if tree.ends():
                self.bound = tree.cost
            if tree.cost < self.cost:
                self.kept, self.away, self.cost = set(tree.kept), set(tree.away), tree.cost


def _fill(weights: Sequence[int], values: Sequence[int], *, capacity: int) -> Packing:
    """As `pack`, by worth per byte, and without a bound."""
    taken, room = [], capacity
    for n in sorted(range(len(weights)), key=lambda n: -values[n] / weights[n]):
        if values[n] and weights[n] <= room:
            taken.append(n)
            room -= weights[n]
    value = sum(values[n] for n in taken)
    return Packing(tuple(taken), capacity - room, value, sum(values))
