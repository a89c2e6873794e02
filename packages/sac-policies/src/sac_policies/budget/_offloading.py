"""Which values to keep, repeat or offload, where copies to the host are hidden behind other work.

What copies cost is what a region of the tape does (`eager/_moved`), for one forward of a region
that is one of several equal ones in a row:

- A value's copy starts when the value is made and the copies before it have ended. Work goes on
  beside it.
- Besides the copy that is under way, others fall behind by less than the largest value that is
  offloaded: where it would be more, work waits. Where the region ends it waits for all that are
  left.
- Values are asked for when backward comes to their region, or to the region after theirs if there
  is one. The region that backward reaches first waits for all of them; what it repeats in between
  does not count as hiding them. The others wait for what takes longer than backward of the region
  after them, which takes no less than a forward.
- Work is what the profiled operators took that made something. Views and writes in place take an
  accelerator next to no time, whatever a host needs to ask for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from ._knapsack import Packing
from ._trace import Item, TracedOp

SECOND = 10**9
Solver = Callable[..., Packing]


@dataclass(frozen=True)
class Copies:
    """The copies of a region's values; all times are in nanoseconds.

    Attributes:
        sizes: bytes of what each operator made, in the order they ran.
        times: to copy that one way, rounded up.
        made: when it was made, from where the region begins.
        work: of one forward.
        rate: bytes per second, each way.
        regions: how many in a row.
    """

    sizes: tuple[int, ...]
    times: tuple[int, ...]
    made: tuple[int, ...]
    work: int
    rate: int
    regions: int

    @classmethod
    def of(cls, ops: Sequence[TracedOp], rate: int, regions: int) -> Copies:
        """Of what a trace in nanoseconds wrote down.

        Args:
            ops: in the order they ran.
            rate: bytes per second, each way.
            regions: at least 1.

        Example:
            >>> Copies.of([TracedOp("aten.mm.default", 0, 8, 5, (), 0)], 10**9, 1).waits([0])
            16
        """
        sizes = tuple(op.out_bytes for op in ops)
        times = tuple(-(-size * SECOND // rate) for size in sizes)
        made = tuple(accumulate(op.cost if op.out_bytes else 0 for op in ops))
        return cls(sizes, times, made, made[-1] if made else 0, rate, regions)

    def waits(self, away: Sequence[int]) -> int:
        """Return how long all regions together wait for copies.

        Args:
            away: the operators whose values are offloaded, ascending.
        """
        moved = sum(self.times[op] for op in away)
        stream = Stream(self, max((self.sizes[op] for op in away), default=0))
        for op in away:
            stream.copy(op)
        back = moved + (self.regions - 1) * max(0, moved - self.work)
        return self.regions * (stream.waited + stream.left) + back

    def most_hidden(self, away: Iterable[int]) -> int:
        """Return the most that copies out can be hidden in one forward.

        Beside each operator that is no more than what may have fallen behind by then.

        Args:
            away: the operators whose values may be offloaded.
        """
        ends = sorted(away)
        most = 2 * max((self.times[op] for op in ends), default=0) + len(ends)  # each rounded up
        made = [*(self.made[op] for op in ends), self.work]
        return sum(min(most, after - before) for before, after in pairwise(made))


class Stream:
    """The copies out of one forward, one after another; times in nanoseconds.

    Args:
        copies: what is copied.
        most: by how many bytes they may fall behind.

    Attributes:
        waited: how long work has waited so far.
        left: how long the copies asked for so far go on after the region's work.
    """

    def __init__(self, copies: Copies, most: int) -> None:
        self.waited = self.left = 0
        self._copies, self._most = copies, most
        self._ends = self._behind = 0
        self._queue: deque[tuple[int, int]] = deque()  # bytes, and when they have left

    def copy(self, op: int) -> None:
        """Copy what an operator made, later than those before it."""
        copies, queue, most = self._copies, self._queue, self._most
        now = copies.made[op] + self.waited
        size, ends = copies.sizes[op], max(self._ends, now) + copies.times[op]
        behind, until = self._behind + size, now
        queue.append((size, ends))
        while behind - queue[0][0] >= most:
            first, left = queue.popleft()
            behind, until = behind - first, max(until, left)
        self.waited += until - now
        self.left = max(0, ends - copies.work - self.waited)
        self._behind, self._ends = behind, ends

    def fork(self) -> Stream:
        """Return another one that is where this one is."""
        other = copy(self)
        other._queue = deque(self._queue)
        return other


class Choice(NamedTuple):
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
    """Choose what to keep, repeat and offload so that regions repeat and wait little.

    A pass goes through the forward once and offloads what then costs less than to stay, at a price
    of a byte that is kept and of a nanosecond of copying. Passes at several prices are tried, then
    changes of single values.

    Args:
        items: what is chosen from, each of one call; costs in nanoseconds.
        copies: of the operators that the items are of.
        capacity: bytes that may be kept; int >= 0.
        solver: as `pack`.

    Returns:
        A choice that costs no more than to keep and repeat alone, nor than to offload exactly what
        is copied both ways in less time than it is made again.
    """
    search = _Search(items, copies, capacity, solver)
    search.offload((), exactly=True)
    search.follow_prices()
    search.change()
    if search.away:
        search.offload(search.away, exactly=True)
    kept, away = (tuple(sorted(each)) for each in (search.kept, search.away))
    return Choice(kept, away, search.waits(away), min(search.bound(), search.cost))


_PASSES, _VISITS = 5, 4_000
"""Prices of a byte that are tried for each price of copying; more where values are few."""
_FEW = 100
"""Values of which bytes are filled exactly after each pass."""
_LOOKS = 15_000
"""Values that are looked at while single ones are changed."""
_PARTS = 8
"""Of a price, where bounds are looked for."""
_NEAR = 0.99
"""Share of the cost above which a bound is made exact in bytes."""


class _Search:
    """The best choice so far; costs are those of all regions together.

    Attributes:
        all: numbers of the items.
        repeat: what each costs that is repeated.
        kept: items that the best choice keeps.
        away: items that it offloads.
        cost: of the best choice.
    """

    def __init__(
        self, items: Sequence[Item], copies: Copies, capacity: int, solver: Solver
    ) -> None:
        regions = copies.regions
        self.all = range(len(items))
        self._copies, self._capacity, self._solver = copies, capacity, solver
        self._ops = [item.ops[0] for item in items]
        self._sizes = [item.kept_bytes for item in items]
        self._back = [copies.times[op] for op in self._ops]
        self.repeat = [regions * item.cost for item in items]
        exposed = [2 * regions * each for each in self._back]
        self._hidden = copies.most_hidden(self._ops)
        self._alone = list(map(min, self.repeat, exposed))
        self._faster = {n for n in self.all if exposed[n] < self.repeat[n]}
        self.kept: set[int] = set()
        self.away: set[int] = set()
        self.cost = sum(self.repeat)

    def waits(self, away: Iterable[int]) -> int:
        """Nanoseconds that regions wait if these are offloaded."""
        return self._copies.waits(sorted(self._ops[n] for n in away))

    def bound(self) -> int:
        """Below what any choice costs.

        Work hides copies out for no longer than `most_hidden`, and copies back to all regions but
        one for no longer than a forward.
        At any price of copying beyond that, a value costs no less than the smaller of its work and
        its copy, and bytes that are kept save no more than the densest fraction of values.
        """
        low, high = 0, _PARTS * self._copies.regions
        while high - low > 2:  # it is concave in the price
            third = (high - low) // 3
            if self._bound(low + third) < self._bound(high - third):
                low += third
            else:
                high -= third
        best = max(0, *(self._bound(price) for price in (0, low, low + 1, high)))
        if not self.away or best > _NEAR * self.cost:
            costs = [min(pair) for pair in zip(self.repeat, self._back, strict=True)]
            packed = self._solver(self._sizes, costs, capacity=self._capacity)
            best = max(best, sum(costs) - packed.bound)
        return best

    def _bound(self, price: int) -> int:
        """The same at one price of copying, in parts of what a nanosecond costs."""
        pairs = zip(self.repeat, self._back, strict=True)
        costs = [min(_PARTS * work, (_PARTS + price) * back) for work, back in pairs]
        whole = sum(costs) - self._densest(costs) - price * self._hidden
        return -(-whole // _PARTS)

    def _hidden_price(self) -> float:
        """Price of a nanosecond of copying at which work hides as much as is worth it."""
        hidden = self._hidden * self._copies.rate // SECOND
        return self._density(self._capacity + hidden, self.repeat) * self._copies.rate / SECOND

    def _densest(self, worth: Sequence[int]) -> int:
        """Worth of what fills the room best, if values could be divided; rounded up."""
        saved, room = 0, self._capacity
        for n in sorted(self.all, key=lambda n: -worth[n] / max(1, self._sizes[n])):
            size = self._sizes[n]
            if size > room:
                return saved + -(-worth[n] * room // size)
            saved, room = saved + worth[n], room - size
        return saved

    def offload(self, away: Iterable[int], *, exactly: bool = False) -> None:
        """Try a choice that offloads these, and keeps what is worth most of all.

        Args:
            away: which.
            exactly: whether bytes are filled by the solver.
        """
        gone = set(away)
        worth = [self._back[n] if n in gone else self._alone[n] for n in self.all]
        if exactly:
            kept = set(self._solver(self._sizes, worth, capacity=self._capacity).taken)
        else:
            kept = self._filled(worth)
        self._consider(kept, (gone | self._faster) - kept)

    def _filled(self, worth: Sequence[int]) -> set[int]:
        """Keep by worth per byte."""
        kept, room = set(), self._capacity
        for n in sorted(self.all, key=lambda n: -worth[n] / max(1, self._sizes[n])):
            if worth[n] and self._sizes[n] <= room:
                kept.add(n)
                room -= self._sizes[n]
        return kept

    def _consider(self, kept: set[int], away: set[int]) -> None:
        """Take a choice if it costs less than the best so far."""
        cost = sum(self.repeat[n] for n in self.all if n not in kept and n not in away)
        if cost + sum(self._back[n] for n in away) >= self.cost:
            return  # waits are no less than that
        cost += self.waits(away)
        if cost < self.cost:
            self.kept, self.away, self.cost = kept, away, cost

    def follow_prices(self) -> None:
        """Make passes at prices of a byte around the one at which what is kept fills the budget."""
        for copying in (0.0, self._hidden_price()):
            low, high = 0.0, 2 * max(self.repeat, default=0) + 1.0
            price = self._density(self._capacity, self.repeat)
            for _ in range(max(_PASSES, min(16, _VISITS // max(1, len(self.all))))):
                kept_bytes, away = self._passed(price, copying)
                self.offload(away, exactly=len(self.all) <= _FEW)
                low, high = (price, high) if kept_bytes > self._capacity else (low, price)
                price = min((low + high) / 2, 2 * low + 1e-9 if low else high / 2)

    def _density(self, room: int, worth: Sequence[int]) -> float:
        """Worth of a byte where those that are worth most for their bytes fill so much room."""
        for n in sorted(self.all, key=lambda n: -worth[n] / max(1, self._sizes[n])):
            room -= self._sizes[n]
            if room < 0:
                return worth[n] / self._sizes[n]
        return 0.0

    def _passed(self, byte: float, copying: float) -> tuple[int, set[int]]:
        """Go through the forward once; return the bytes kept, and what is offloaded.

        Args:
            byte: price of a byte that is kept.
            copying: price of a nanosecond of copying out.
        """
        copies, regions = self._copies, self._copies.regions
        worth = [n for n in self.all if self._back[n] < self.repeat[n]]
        stream = Stream(copies, max((self._sizes[n] for n in worth), default=0))
        kept_bytes, moved, away = 0, 0, set()
        for n in self.all:
            size, back = self._sizes[n], self._back[n]
            keep = byte * size if size <= self._capacity else float("inf")
            stay = min(keep, self.repeat[n])
            cost = (1 + copying) * back
            late = max(0, moved + back - copies.work) - max(0, moved - copies.work)
            cost += (regions - 1) * late
            if cost < stay:
                before = stream.waited + stream.left
                fork = stream.fork()
                fork.copy(self._ops[n])
                cost += regions * (fork.waited + fork.left - before)
                if cost < stay:
                    stream, moved = fork, moved + back
                    away.add(n)
                    continue
            kept_bytes += size if keep < self.repeat[n] else 0
        return kept_bytes, away

    def change(self) -> None:
        """Decide otherwise about single items while that costs less."""
        looks, before = _LOOKS, self.cost + 1
        dearest = sorted(self.all, key=lambda n: -self.repeat[n])
        while self.cost < before:
            before = self.cost
            for n in dearest:
                kept, away = self.kept - {n}, self.away - {n}
                ways = [(kept, away), (kept, away | {n})]
                if sum(self._sizes[each] for each in kept) + self._sizes[n] <= self._capacity:
                    ways.append((kept | {n}, away))
                for way in ways:
                    looks -= len(self.all) + len(way[1])
                    self._consider(*way)
                if looks < 0:
                    return
