"""Copies out as a flow: each value may be offloaded in part.

Then what is still to pay is, at any point of the forward, a convex function of how far copies are
behind: `Rest`. It is found from the end of the forward to its beginning, by sorting what a
nanosecond of copies saves. That guides passes (`_sweep`) and is a bound.

Rule 1. A bound knows which value is the largest that is offloaded, or that none is larger. When a
        value is made, and work has waited as it must, what is behind is the copy that is under way
        and others that are together smaller than the largest (`_copies`, Rule 2); where the value
        is the largest and offloaded, it is its copy alone. Which copy can be under way depends on
        where in the forward that is: none that has ended by then in any plan, and none that no
        better plan offloads.
Rule 2. Take a plan, and let a flow offload the first call of each of its items, but for those that
        save nothing, and wait only where these limits ask for it. By induction over the forward it
        has waited no longer than the plan, and its copies leave no later. So what it pays is below
        what the plan pays.
Rule 3. A plan that offloads a value costs what all values cost at the least, and what copying that
        one costs beyond its own least. Where that is no less than the best plan, no better plan
        offloads it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from ._bounds import ONE, Values

PART = 1 << 20
"""What a nanosecond is in what a flow costs, which is in integers, so that bounds are exact."""
_STEP = 11, 10
"""Of prices that are tried one after another."""
_RISES = 8
"""How many."""
_FLOWS = 12
"""Flows after which no more values are told apart."""
_ENOUGH = 0.0025
"""A gap that needs no better bound."""

Limits = Sequence[int | None]
"""How far copies may be behind when an item is made, in nanoseconds; None: it is not offloaded."""


class Rest(NamedTuple):
    """What is still to pay, beyond what it is where no copy is behind.

    Attributes:
        slopes: what a nanosecond behind costs, in 1/PART, ascending.
        lengths: for how many nanoseconds.
        beyond: what each past those costs.
    """

    slopes: list[int]
    lengths: list[int]
    beyond: int

    def at(self, behind: Iterable[int]) -> list[int]:
        """What it is where copies are behind by so much, each more than the one before it."""
        found, steps = [], zip(self.slopes, self.lengths, strict=True)
        pays, begins, slope, ends = 0, 0, 0, 0
        for each in behind:
            while each > ends:
                pays += slope * (ends - begins)
                begins = ends
                slope, length = next(steps, (self.beyond, each))
                ends += length
            found.append(pays + slope * max(0, each - begins))
        return found


def flow(
    values: Values,
    stay: Sequence[int],
    limits: Limits,
    forced: int | None = None,
    trail: dict[int, Rest] | None = None,
) -> int:
    """Return the least that offloading adds to what values cost that stay, in 1/PART.

    Args:
        values: what is decided about.
        stay: what each costs that is not offloaded.
        limits: as `limits_of`.
        forced: an item that is offloaded, and whole.
        trail: is given what is to pay when each item has been decided about.
    """
    copies, wait = values.copies, values.copies.regions * PART
    slopes: list[int] = []
    lengths: list[int] = []
    pays, after = 0, copies.work
    for n in reversed(values.all):
        limit, gain = limits[n], stay[n] - values.copy[n]
        if limit is None or (gain <= 0 and n != forced):
            continue
        op = values.items[n].ops[0]
        left, after = after - copies.made[op], copies.made[op]
        if slopes and not slopes[0]:
            lengths[0] += left
        else:
            slopes.insert(0, 0)
            lengths.insert(0, left)
        _cut(slopes, lengths, limit)
        if trail is not None:
            trail[n] = Rest(slopes[:], lengths[:], wait)
        time = copies.times[op]
        saves = -(-gain * PART // time)
        if n == forced or saves >= wait:
            pays -= gain * PART
        else:  # as much of it as is worth more than what comes after it
            at = bisect_left(slopes, saves)
            slopes.insert(at, saves)
            lengths.insert(at, time)
            pays -= saves * time
        pays += _skip(slopes, lengths, time, wait)
    return pays


def _cut(slopes: list[int], lengths: list[int], limit: int) -> None:
    """Leave what is within the limit; past it, work waits."""
    over = sum(lengths) - limit
    while over > 0:
        if lengths[-1] > over:
            lengths[-1] -= over
            return
        over -= lengths.pop()
        slopes.pop()


def _skip(slopes: list[int], lengths: list[int], time: int, wait: int) -> int:
    """Go on from where so much is behind; return what that adds."""
    added, whole = 0, 0
    while whole < len(slopes) and lengths[whole] <= time:
        added += slopes[whole] * lengths[whole]
        time -= lengths[whole]
        whole += 1
    del slopes[:whole], lengths[:whole]
    if not slopes:
        return added + wait * time
    lengths[0] -= time
    return added + slopes[0] * time


def limits_of(
    values: Values, most: int, may: Container[int], forced: int | None = None
) -> list[int | None]:
    """How far copies may be behind if none offloaded is larger than `most` bytes (Rule 1).

    Args:
        values: what is decided about.
        most: bytes of one call.
        may: items that a better plan may offload.
        forced: an item that is offloaded.
    """
    copies, others = values.copies, values.behind(most)
    limits: list[int | None] = [None] * len(values.items)
    firsts = {item.ops[0] for item in values.items}
    calls = sorted((op, n) for n in values.all for op in values.items[n].ops)
    under_way: deque[tuple[int, int]] = deque()  # how long each takes, and when it has left
    for op, n in calls:
        if n not in may or values.largest[n] > most:
            continue
        now, time, first = copies.made[op], copies.times[op], 0
        while under_way and under_way[0][1] <= now:
            under_way.popleft()
        for takes, left in under_way:  # longer ones first, which have left first
            if takes <= first:
                break
            first = max(first, min(takes, left - now))
        stays = others + first
        goes = time if copies.sizes[op] == most else stays
        if op in firsts:
            limits[n] = goes if n == forced else max(stays, goes)
        left = max(now + goes, under_way[-1][1] if under_way else 0)
        while under_way and under_way[-1][0] <= time:
            under_way.pop()
        under_way.append((time, left))
    return limits


def usual_limits(values: Values, largest: int) -> list[int | None]:
    """How far copies are behind in plans that offload an item of one call, and none larger.

    That is no bound, but near to where most copies are small that are under way.
    """
    copies, most = values.copies, values.largest[largest]
    limit = copies.times[values.items[largest].ops[0]]
    return [
        limit if size <= most and len(item.ops) == 1 else None
        for item, size in zip(values.items, values.largest, strict=True)
    ]


class ByLargest:
    """A bound by which value is the largest that is offloaded.

    Args:
        values: what is decided about.
        price: of a byte kept, in 1/ONE; higher ones are tried, too.
        cost: of a plan.
    """

    def __init__(self, values: Values, price: int, cost: int) -> None:
        self._values, self._price, self._flows = values, price, 0
        self._cost, self._enough = cost, int(cost * (1 - _ENOUGH))
        stay = values.stay(price)
        self._loses = [copy - each for copy, each in zip(values.copy, stay, strict=True)]
        self._alone = sum(stay) - -(-price * values.capacity // ONE)  # where nothing is offloaded
        spare = cost - self._alone - sum(min(0, each) for each in self._loses)
        self._may = {n for n in values.all if self._loses[n] < spare}  # Rule 3

    def bound(self) -> int:
        """No plan costs less than this, or than the plan that is known."""
        largest, found = self._values.largest, self._cost
        for n in sorted(self._may, key=lambda n: -largest[n]):
            enough = min(found, self._enough)
            if self._loses[n] < 0 or self._flows >= _FLOWS:
                rest = self._best(n, enough)
                if rest >= enough or self._flows >= _FLOWS:
                    return min(found, rest)
            found = min(found, self._best(n, enough, n))
        return min(found, self._alone)

    def _best(self, largest: int, enough: int, forced: int | None = None) -> int:
        """The bound at the best price, where no value is larger than one, or that one is."""
        values, found, price = self._values, -1, self._price
        limits = limits_of(values, values.largest[largest], self._may, forced)
        for _ in range(_RISES):
            price = price * _STEP[0] // _STEP[1]
            bound = bound_of(values, price, limits, forced)
            self._flows += 1
            if bound <= found:
                break
            found = bound
            if found >= enough:
                break
        return found


def bound_of(values: Values, price: int, limits: Limits, forced: int | None = None) -> int:
    """Below what plans cost that keep to limits, and offload one item; `price` in 1/ONE."""
    stay = values.stay(price)
    pays = -(-flow(values, stay, limits, forced) // PART)
    return sum(stay) + pays - -(-price * values.capacity // ONE)
