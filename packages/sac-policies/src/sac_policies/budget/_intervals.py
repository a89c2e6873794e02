"""Predicts a step in which regions are on different levels, from steps on single levels.

A step is divided into intervals. A region's interval begins in forward at its call, in backward
when the gradient of its output is computed, and ends where the next one begins. The tail is the
interval after the last call, with the model's head and the loss. An interval does not depend on the
levels of other regions, so a mixture is assembled from measured steps.

There are two exceptions. In backward, a region that offloads requests the values of the region that
offloaded before it, and the first one that backward reaches also its own.

And the tail: objects such as a cache may hold tensors until then, and the tail frees
those that no region keeps. How many bytes of a region it frees depends on that region's level: the
bytes that it frees on a level are divided evenly among the regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from .._tensors import tensors_in
from .._torch_compat import backward_id
from .._torch_compat._module_calls import around_calls
from ._choose import Option, cheapest
from ._measure import Interval, Key, Marks, highest, tail_of


@contextmanager
def marked(regions: Sequence[nn.Module], marks: Marks) -> Iterator[None]:
    """Mark the beginning of each region, in forward and backward, with its `Key`."""
    calls = [0] * len(regions)

    def begin(number: int, *_: Any) -> None:
        if backward_id() < 0:  # other code may recompute a region
            marks.mark((number, calls[number], False))

    def end(number: int, out: Any) -> None:
        if backward_id() >= 0:
            return
        call, calls[number] = calls[number], calls[number] + 1
        marks.mark((number, call, None))
        seen: list[None] = []

        def gradient(_: torch.Tensor) -> None:
            if not seen:
                seen.append(None)
                marks.mark((number, call, True))

        for tensor in tensors_in(out):
            if tensor.requires_grad:
                tensor.register_hook(gradient)

    with around_calls(regions, begin, end):
        yield


class Steps:
    """One measured step per level, the plain one first.

    Args:
        kinds: kind of each region. Times of equal regions of one kind are combined, since a short
            disturbance hits only one of them.
        measured: by level, the intervals in order; that before the first region has the key None.
    """

    def __init__(self, kinds: Sequence[object], measured: Sequence[Sequence[Interval]]) -> None:
        self._plain = measured[0]
        self._by_level = [{each.key: each for each in one} for one in measured]
        self._count = len(kinds)
        self._tail: Key | None = tail_of(each.key for each in self._plain)
        self._largest = largest_pass(self._plain)
        self._own = [self._in_largest(one) for one in measured]
        self._away = [[sum(each.away for each in own) for own in one] for one in self._own]
        tails = [one.get(self._tail) for one in self._by_level]
        self._left = list(map(self._left_in_tail, measured, tails))
        self._late = list(map(self._freed_late, tails, self._left))
        self.costs = self._costs(kinds, measured)

    def mixture(self, choice: Sequence[int]) -> Iterator[Interval]:
        """Yield the intervals of a step with the levels of `choice`."""
        for plain in self._plain:
            yield self._interval_of(plain, choice)

    def growth(self, choice: Sequence[int]) -> int:
        """Return the peak, minus the bytes before the step, with the levels of `choice`."""
        return highest(self.mixture(choice))

    def choose(self, allowed: int) -> tuple[int, ...] | None:
        """Return the fastest levels with a growth of at most `allowed` bytes."""
        target = allowed
        for _ in range(5):
            choice = self._search(target)
            if choice is None:
                return None
            over = self.growth(choice) - allowed
            if over <= 0:
                return choice
            target -= over
        return None

    def least(self) -> tuple[int, ...]:
        """Return the fastest levels with the lowest predicted peak."""
        choices = [(level,) * self._count for level in range(len(self._by_level))]
        best = min(choices, key=self.growth)
        below, allowed = 0, self.growth(best)
        while allowed - below > 1:
            middle = (below + allowed) // 2
            choice = self.choose(middle)
            if choice is None:
                below = middle
            else:
                best, allowed = choice, self.growth(choice)
        return self.choose(allowed) or best

    def _interval_of(self, plain: Interval, choice: Sequence[int]) -> Interval:
        if plain.region is None:
            return plain
        level = choice[plain.region]
        own = self._by_level[level].get(plain.key, plain)
        if plain.key == self._tail:
            late = sum(self._late[level][number] for number, level in enumerate(choice))
            return replace(own, grown=plain.grown - late - self._left[level])
        more = self._more_requested(choice, plain.region) if plain.key[2] else 0
        return replace(own, grown=own.grown + more, most=max(0, own.most + more)) if more else own

    def _more_requested(self, choice: Sequence[int], number: int) -> int:
        """Return how many bytes more a region brings back than with all regions on its level."""
        away = self._away[choice[number]]
        if not away[number]:
            return 0
        chosen = [self._away[level][n] for n, level in enumerate(choice)]
        before = [size for size in chosen[:number] if size]
        more = before[-1] if before else 0
        if number:
            more -= away[number - 1]
        if number + 1 < self._count and not any(chosen[number + 1 :]):
            more += away[number]
        return more

    def _left_in_tail(self, one: Sequence[Interval], tail: Interval | None) -> int:
        """Return the bytes of the last region's inputs that the tail frees.

        They are estimated by those freed between the last two regions.
        """
        if tail is None:
            return 0
        plain = self._by_level[0]
        between = [each for each in one if each.region is not None and each.key[2] is None]
        more = [plain[each.key].grown - each.grown for each in between if each.key != self._tail]
        return max(0, more[-1]) if more else 0

    def _freed_late(self, tail: Interval | None, left: int) -> list[int]:
        """Return by region how many more bytes the tail frees than with everything kept."""
        if tail is None:
            return [0] * self._count
        less, count = self._by_level[0][self._tail].grown - tail.grown - left, self._count
        return [less * (n + 1) // count - less * n // count for n in range(count)]

    def _costs(
        self, kinds: Sequence[object], measured: Sequence[Sequence[Interval]]
    ) -> list[list[int]]:
        """Return by region and level the extra time over keeping everything."""
        spent = [self._by_region(one) for one in measured]
        alike: dict[Any, list[int]] = {}
        for number, kind in enumerate(kinds):
            keeps = tuple(self._kept(number, level) for level in range(len(measured)))
            alike.setdefault((kind, keeps), []).append(number)
        found: list[list[int]] = [[]] * len(kinds)
        for (_, keeps), numbers in alike.items():
            more = costs_of([[own[n] for n in numbers] for own in spent], keeps)
            for number in numbers:
                found[number] = more
        return found

    def _in_largest(self, one: Sequence[Interval]) -> list[list[Interval]]:
        """Return by region its intervals in the largest pass, without the tail."""
        keys = {each.key for each in self._largest} - {self._tail}
        found: list[list[Interval]] = [[] for _ in range(self._count)]
        for each in one:
            if each.region is not None and each.key in keys:
                found[each.region].append(each)
        return found

    def _by_region(self, one: Sequence[Interval]) -> list[int]:
        found = [0] * self._count
        for each in one:
            if each.region is not None and each.key != self._tail:
                found[each.region] += each.ns
        return found

    def _kept(self, number: int, level: int) -> int:
        return sum(each.grown for each in self._own[level][number] if not each.key[2])

    def _search(self, target: int) -> tuple[int, ...] | None:
        """`choose` for a pass that calls every region once and reverses the order in backward.

        Otherwise the result is approximate, and `choose` checks it. Of several passes, as in
        accumulation, the one with the highest peak counts.
        """
        start = self._plain.index(self._largest[0])
        own = [each for each in self._largest if each.region is not None]
        begin = self._largest.index(own[0]) if own else 0
        before = sum(each.grown for each in self._plain[: start + begin])
        order = list(dict.fromkeys(each.key[0] for each in own))
        left = [sum(each.grown for each in own) for own in self._own[0]]
        rest = sum(left[number] for number in order)
        between, top = self._between()
        parts = []
        for number in order:
            rest -= left[number]
            options = []
            for level, cost in enumerate(self.costs[number]):
                first, last = self._most(number, level)
                kept = self._kept(number, level) - self._late[level][number]
                room = target - max(first, kept + rest + between + last)
                options.append(Option(kept, cost, room))
            parts.append(options)
        levels = cheapest(parts, start=before, limit=target - top)
        if levels is None:
            return None
        choice = dict(zip(order, levels, strict=True))
        return tuple(choice.get(number, 0) for number in range(self._count))

    def _between(self) -> tuple[int, int]:
        """Return the growth from the end of the last region's forward to backward, and its peak."""
        now = top = 0
        for each in self._largest:
            if each.key is not None and (each.key == self._tail or each.region is None):
                top = max(top, now + each.most)
                now += each.grown
        return now, top

    def _most(self, number: int, level: int) -> tuple[int, int]:
        """Return the peaks of forward and of backward, each over the bytes at its start."""
        most, called = {False: 0, True: 0}, 0
        for each in self._own[level][number]:
            backward = bool(each.key[2])
            before = called if each.key[2] is None else 0
            most[backward] = max(most[backward], before + each.most)
            called = each.grown
        return most[False], most[True]


def largest_pass(plain: Sequence[Interval]) -> list[Interval]:
    """Return the intervals of the pass, a forward and its backward, with the highest peak.

    Example:
        >>> first, last = Interval((0, 0, False), 8, 8), Interval((0, 0, True), -4, 0)
        >>> again = Interval((0, 1, False), 8, 8)
        >>> largest_pass([first, last, again]) == [again]
        True
    """
    passes: list[list[Interval]] = [[]]
    peaks, now, in_backward = [0], 0, False
    for each in plain:
        is_forward = each.region is not None and each.key[2] is False
        if is_forward and in_backward:
            passes.append([])
            peaks.append(0)
        is_backward = isinstance(each.key, str) or (each.key is not None and each.key[2] is True)
        in_backward = is_backward or (in_backward and not is_forward)
        passes[-1].append(each)
        peaks[-1] = max(peaks[-1], now + each.most)
        now += each.grown
    return passes[max(range(len(passes)), key=peaks.__getitem__)]


_NEAR = 50
"""Levels are as fast as another within one part in so many of the plain time."""


def costs_of(spent: Sequence[Sequence[int]], kept: Sequence[int]) -> list[int]:
    """Return by level the extra nanoseconds of a region over the first level.

    A level that keeps less costs no more than another if it is at most 2 % of the plain time
    slower. Levels that checkpoint cost at least one nanosecond.

    Args:
        spent: by level, the nanoseconds of each of several equal regions.
        kept: bytes that a region keeps, by level.

    Example:
        >>> costs_of([[500, 500], [530, 550], [520, 520]], [9, 4, 2])
        [0, 41, 21]
        >>> costs_of([[500], [530], [540]], [9, 4, 2])
        [0, 31, 31]
    """
    times = [int(median(own or [0])) for own in spent]
    near = times[0] // _NEAR
    more = [max(0, each - times[0]) + 1 for each in times]
    others = range(1, len(more))

    def is_as_fast(level: int, other: int) -> bool:
        return kept[level] < kept[other] and more[level] - more[other] <= near

    return [0] + [
        min(more[each] for each in others if each == level or is_as_fast(level, each))
        for level in others
    ]
