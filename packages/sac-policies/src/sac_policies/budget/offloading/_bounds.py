"""What values cost where they may be offloaded, and bounds that no plan for all of them is below.

Costs are nanoseconds of all regions in a row together. Copying a value costs its way back to the
region that backward reaches first; past what a forward hides, it costs that time again on each way
out, and on each way back to the other regions (`_copies`).

Rule 1. A bound has prices: of a byte kept, and of a nanosecond waited for copies out. At any prices
        what all values cost at the least, less what the room is worth, is below what any plan
        costs. It takes copies out to be hidden anywhere in the forward, and copies back to regions
        but one to be hidden in full; what a plan costs is asked of `Copies`.
Rule 2. Bytes that are kept are those of whole values. So none is kept that alone is too large, and
        room past a multiple of what divides all sizes is no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import gcd
from typing import NamedTuple

from .._knapsack import Packing
from .._trace import Item
from ._copies import SECOND, Copies

Solver = Callable[..., Packing]
ONE = 1 << 40
"""What 1 is in prices, which are integers, so that bounds are exact."""


class Prices(NamedTuple):
    """What waiting for a nanosecond of copies out costs, and a byte kept, in 1/ONE."""

    out: int
    kept: int


class Values:
    """The items, what each costs in all regions together, and bounds on what all cost."""

    def __init__(self, items: Sequence[Item], copies: Copies, capacity: int) -> None:
        self.items, self.copies = items, copies
        self.all, regions = range(len(items)), copies.regions
        self.sizes = [item.kept_bytes for item in items]
        self.largest = [max(copies.sizes[op] for op in item.ops) for item in items]  # of a call
        self.capacity = capacity - capacity % (gcd(*self.sizes) or 1)  # Rule 2
        self.repeat = [regions * item.cost for item in items]
        self.copy = [sum(copies.times[op] for op in item.ops) for item in items]
        self.exposed = [2 * regions * each for each in self.copy]  # if nothing is hidden
        self.byte_ns = 1e9 / copies.rate
        hidden = copies.most_hidden(op for item in items for op in item.ops)
        self.hidden = [hidden[item.ops[0]] for item in items]

    def waits(self, away: Iterable[int]) -> int:
        """Nanoseconds that regions wait if these are offloaded."""
        return self.copies.waits(sorted(op for n in away for op in self.items[n].ops))

    def behind(self, most: int) -> int:
        """Nanoseconds that copies take at the most that are together smaller than one value."""
        copies = self.copies
        sizes = [copies.sizes[op] for item in self.items for op in item.ops]
        others = most - gcd(*sizes)
        return -(-others * SECOND // copies.rate) + others // min(sizes)  # each is rounded up

    def fits(self, kept: Iterable[int]) -> bool:
        """Whether these may be kept."""
        return sum(self.sizes[n] for n in kept) <= self.capacity

    def density(self, room: float, worth: Sequence[int]) -> float:
        """Worth of a byte where those that are worth most for their bytes fill so much room."""
        sizes = self.sizes
        for n in sorted(self.all, key=lambda n: -worth[n] / sizes[n]):
            room -= sizes[n]
            if room < 0:
                return worth[n] / sizes[n]
        return 0.0

    def least(self, prices: Prices) -> list[int]:
        """What each costs at the least (Rule 1), in 1/ONE."""
        copied, none = ONE + prices.out, ONE * max(self.repeat)
        return [
            min(
                repeat * ONE,
                copied * copy,
                prices.kept * size if size <= self.capacity else none,
            )
            for repeat, size, copy in zip(self.repeat, self.sizes, self.copy, strict=True)
        ]

    def stay(self, price: int) -> list[int]:
        """What each costs at the least that is not offloaded; `price` is of a byte, in 1/ONE."""
        return [
            min(repeat, price * size // ONE) if size <= self.capacity else repeat
            for repeat, size in zip(self.repeat, self.sizes, strict=True)
        ]

    def bound(self, prices: Prices) -> int:
        """Below what any plan costs (Rule 1)."""
        room = prices.kept * self.capacity + prices.out * self.hidden[0]
        return -(-(sum(self.least(prices)) - room) // ONE)

    def bound_of_kept(self, solver: Solver) -> int:
        """The same with waiting free, and the bytes that are kept divided in integers."""
        costs = [min(pair) for pair in zip(self.repeat, self.copy, strict=True)]
        return sum(costs) - solver(self.sizes, costs, capacity=self.capacity).bound
