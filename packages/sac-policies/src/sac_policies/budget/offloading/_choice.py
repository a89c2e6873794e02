"""Finds a plan, and says how much better any plan can be.

Prices make of three choices one pass over the forward (`_sweep`): what a byte kept costs is found
so that what is kept at that price fills the budget. Loose passes raise the bound; exact ones, which
know the queue of copies, find what to offload. Given that, what to keep is a knapsack. Where the
bound is still far off, it is the least of what flows cost (`_flow`), a flow for each value that may
be the largest that is offloaded.

Rule 1. Few values are tried in all ways that bounds leave open, and then the plan is optimal.
Rule 2. Effort is counted in values looked at, never in time: one trace has one plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._knapsack import Packing
from .._trace import Item
from ._bounds import ONE, Prices, Solver, Values
from ._copies import Copies
from ._flow import ByLargest, bound_of, limits_of
from ._sweep import sweep
from ._tree import Tree

_NEAR = 1e-5
"""A gap at which no better plan is looked for."""
_FILLED = 0.01
"""A gap that is not too large to be one of filling bytes."""
_SMALL = 1e-4
"""A gap at which no more passes are made; nor are they to raise the bound by less."""
_PRICES = 8
"""Passes for the bound."""
_LARGER = 2
"""Passes with a largest value that is not worth it by itself."""
_WIDE = 8
"""States that go on in the pass that is made with care."""
_CLOSE = 0.003
"""A gap at which the bound is not looked at closer."""
_LOOKS = 50_000
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
        search.price_bytes()
        search.bound_bytes()
        search.follow()
        search.fill()
        search.change()
        search.bound_by_largest()
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
        price: of a byte kept, in 1/ONE, at which the bound is the highest.
    """

    def __init__(self, values: Values, solver: Solver) -> None:
        self.values, self._solver = values, solver
        self.kept: set[int] = set()
        self.away: set[int] = set()
        self.cost = sum(values.repeat)
        self.bound = self.price = 0
        self.prices: list[Prices] = []
        if values.items:
            self._find_prices()

    def _find_prices(self) -> None:
        """With waiting free, and at the price at which all that can be hidden is used up."""
        values, regions = self.values, self.values.copies.regions
        free = [min(pair) for pair in zip(values.repeat, values.copy, strict=True)]
        self.prices.append(Prices(0, int(values.density(values.capacity, free) * ONE)))
        room = values.capacity + values.hidden[0] / values.byte_ns
        dearest = values.density(room, values.repeat) / values.byte_ns - 1
        out = max(0, min(int(dearest * ONE), regions * ONE))
        if out:
            self.prices.append(Prices(out, int((ONE + out) * values.byte_ns)))
        self.bound = max(0, *(values.bound(each) for each in self.prices))
        self.price = self.prices[-1].kept

    @property
    def gap(self) -> float:
        """Share of the cost that a better plan could save at most."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0

    def price_bytes(self) -> None:
        """Raise the bound by loose passes, and try what they offload.

        As a function of the price a bound is concave, and what it keeps past the capacity is its
        slope. So the next price is where the tangents from both sides meet.
        """
        self._try(())
        price, best = self.price, -1
        low: _Tangent | None = None
        high: _Tangent | None = None
        for _ in range(_PRICES):
            found = sweep(self.values, price)
            self._try(found.away)
            if found.bound > best:
                best, self.price = found.bound, price
            self.bound = max(self.bound, best)
            tangent = _Tangent(price, found.bound, found.kept_bytes - self.values.capacity)
            if self.gap <= _NEAR or tangent.slope == 0 or price == 0 > tangent.slope:
                return
            low, high = (tangent, high) if tangent.slope > 0 else (low, tangent)
            if low is None or high is None:
                price = price // 2 if low is None else 2 * price + 1
                continue
            price = low.meets(high)
            if not low.price < price < high.price or low.at(price) - best <= _SMALL * self.cost:
                return

    def follow(self) -> None:
        """Offload what exact passes find.

        Each takes another value to be the largest that is offloaded; the one with which the best
        plan is found is passed again, with more states. A queue leaves less room than loose passes
        take it to have, so prices are above theirs; with more states, nearer to where what is kept
        fills the budget.
        """
        price = 7 * self.price // 4
        best: tuple[int, int] | None = None
        for largest in self._largest():
            before, found = self.cost, sweep(self.values, price, largest)
            self._try(found.away)
            best = (largest, found.kept_bytes) if self.cost < before else best
        if best and self.gap > _SMALL:
            room = max(1, self.values.capacity)
            price = price * (best[1] + room) // (2 * room)
            self._try(sweep(self.values, price, best[0], width=_WIDE).away)

    def _largest(self) -> Iterator[int]:
        """Which values may be the largest that is offloaded, while plans can be better.

        The largest that is worth it. Then one half as large, and larger ones that take a little
        longer to copy than to repeat, so that others may fall behind by more: those first with
        which a flow costs the least, and none with which it costs as much as the best plan.
        """
        values = self.values
        single = [n for n in values.all if len(values.items[n].ops) == 1]
        lost = {n: values.copy[n] - values.repeat[n] for n in single}
        worth = sorted((n for n in single if lost[n] < 0), key=lambda n: -values.sizes[n])
        most = values.sizes[worth[0]] if worth else 0
        halves = [n for n in worth if values.sizes[n] <= most // 2]
        larger = [n for n in single if lost[n] >= 0 and values.sizes[n] > most > 0]
        if self.gap > _SMALL:
            yield from worth[:1]
        if self.gap > _SMALL:
            larger = sorted(larger, key=lost.__getitem__)[:_LARGER]
            larger = [n for n in larger if 2 * lost[n] < self.cost - self.bound]
            least = {n: self._least(n, {n, *worth}) for n in halves[:1] + larger}
            for n in sorted(least, key=least.__getitem__):
                if self.gap > _SMALL and least[n] < self.cost:
                    yield n

    def _least(self, largest: int, away: set[int]) -> int:
        """What a flow costs that offloads these, and one that is the largest."""
        values = self.values
        limits = limits_of(values, values.largest[largest], away, largest)
        return bound_of(values, 3 * self.price // 2, limits, largest)

    def bound_bytes(self) -> None:
        """Fill bytes as well as can be, which is a bound, too, where hardly anybody waits."""
        if self.gap > _NEAR and (self.gap <= _FILLED or not self.away):
            self.fill()
            self.bound = max(self.bound, self.values.bound_of_kept(self._solver))

    def bound_by_largest(self) -> None:
        """Raise the bound by telling apart which value is the largest that is offloaded."""
        if self.gap > _CLOSE:
            self.bound = max(self.bound, ByLargest(self.values, self.price, self.cost).bound())

    def fill(self) -> None:
        """Fill the bytes of the best plan better."""
        if self.gap > _NEAR:
            self._try(self.away, self._solver)

    def _try(self, away: Iterable[int], solver: Solver | None = None) -> None:
        """Keep what is worth most; of what is offloaded, that is its copy. Offload of the rest what
        takes less time to wait for than to repeat.
        """
        values, gone = self.values, set(away)
        worth = [
            values.copy[n] if n in gone else min(values.repeat[n], values.exposed[n])
            for n in values.all
        ]
        kept = set((solver or _fill)(values.sizes, worth, capacity=values.capacity).taken)
        exposed = {n for n in values.all if values.exposed[n] < values.repeat[n]}
        self._consider(kept, (gone | exposed) - kept)

    def _consider(self, kept: set[int], away: set[int]) -> None:
        """Take a plan if it costs less than the best so far."""
        values = self.values
        cost = sum(values.repeat[n] for n in values.all if n not in kept and n not in away)
        if cost + sum(values.copy[n] for n in away) >= self.cost:
            return  # waits are no less than that
        cost += values.waits(away)
        if cost < self.cost:
            self.kept, self.away, self.cost = kept, away, cost

    def change(self) -> None:
        """Decide otherwise about single items while that costs less."""
        values, looks, before = self.values, _LOOKS, self.cost + 1
        dearest = sorted(values.all, key=lambda n: -values.repeat[n])
        while self.cost < before and self.gap > _NEAR:
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


class _Tangent(NamedTuple):
    """Of the bound as a function of the price: where it touches, and its slope in 1/ONE."""

    price: int
    bound: int
    slope: int

    def at(self, price: int) -> int:
        """Return how high it is there."""
        return self.bound + self.slope * (price - self.price) // ONE

    def meets(self, other: _Tangent) -> int:
        """The price at which both are as high."""
        return self.price + (other.at(self.price) - self.bound) * ONE // (self.slope - other.slope)


def _fill(weights: Sequence[int], values: Sequence[int], *, capacity: int) -> Packing:
    """As `pack`, by worth per byte, and without a bound."""
    taken, room = [], capacity
    for n in sorted(range(len(weights)), key=lambda n: -values[n] / weights[n]):
        if values[n] and weights[n] <= room:
            taken.append(n)
            room -= weights[n]
    value = sum(values[n] for n in taken)
    return Packing(tuple(taken), capacity - room, value, sum(values))
