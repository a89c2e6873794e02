"""Times what levels cost in training, divided as memory is.

- A timed step runs as in training: no profiler, no garbage collection, and engines have learnt
  from forwards before.
- On the CPU the clock is per-thread CPU time, so other processes do not count. Backward runs in
  the calling thread.
- Levels are timed in rounds, and the fastest round counts. Two levels whose difference is smaller
  than it varies between rounds cost the same; of four rounds and more, the two extreme differences
  are dropped. A short disturbance hits one level and not the next.
- Steps that take long are timed while their memory is measured, and not again: the profiler adds
  little to them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

Spent = Mapping[Any, int]
"""By key, nanoseconds until the next mark."""
_LEAST_ROUNDS, _MOST_ROUNDS, _LONG_NS = 2, 5, 250_000_000
"""Rounds, of which more than the least run until they take so long; a longer profiled round of all
levels is not timed again."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Delay garbage collection."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Clock:
    """Divides the time of a step at marks.

    Args:
        device: CPU, or an accelerator that is synchronized at each mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read: list[tuple[Any, int]] = []

    def mark(self, key: Any) -> None:
        """Begin an interval."""
        self._read.append((key, self._now()))

    def spent(self, step: Callable[[], object]) -> dict[Any, int]:
        """Run a step; return nanoseconds from each mark to the next, by key, None the first's."""
        with no_collection():
            self.mark(None)
            step()
            end = self._now()
        ends = [at for _, at in self._read[1:]] + [end]
        return {key: at - began for (key, began), at in zip(self._read, ends, strict=True)}

    def _now(self) -> int:
        if self._device.type == "cpu":
            return time.thread_time_ns()
        getattr(torch, self._device.type).synchronize(self._device)
        return time.perf_counter_ns()


def are_long(profiled: Sequence[Spent]) -> bool:
    """Whether profiled steps, one on each level, are long enough to be timed as they are."""
    return sum(sum(spent.values()) for spent in profiled) > _LONG_NS


def clocked_in_rounds(levels: int, clocked: Callable[[int], Spent]) -> list[list[Spent]]:
    """Time steps of all levels in turn, because a machine gets slower meanwhile.

    Args:
        levels: how many there are.
        clocked: runs a step on a level and returns the same on all ranks.
    """
    found: list[list[Spent]] = [[] for _ in range(levels)]
    order = list(range(levels))
    total = 0
    while len(found[0]) < _LEAST_ROUNDS or (len(found[0]) < _MOST_ROUNDS and total < _LONG_NS):
        for level in order:
            found[level].append(clocked(level))
            total += sum(found[level][-1].values())
        order.reverse()
    return found


def costs(rounds: Sequence[Sequence[Sequence[int]]], kept: Sequence[int]) -> list[int]:
    """Return by level how many nanoseconds more regions that are alike take than on the first.

    Args:
        rounds: by level, then by round, the nanoseconds of each region.
        kept: bytes that a region keeps, by level.

    Returns:
        Numbers of at least 0, the same for levels that rounds do not tell apart.

    Example:
        >>> costs([[[10, 10]], [[40, 60]], [[30, 30]]], [9, 4, 2])
        [0, 40, 20]
        >>> costs([[[10]] * 2, [[40], [42]], [[41], [41]]], [9, 4, 2])
        [0, 30, 30]
    """
    times = [[int(median(each)) for each in own] or [0] for own in rounds]
    more = [max(0, min(own) - min(times[0])) for own in times]

    def is_as_fast(level: int, other: int) -> bool:
        differ = sorted(one - two for one, two in zip(times[level], times[other], strict=True))
        if len(differ) > 3:
            differ = differ[1:-1]
        doubt = differ[-1] - differ[0]
        return kept[level] < kept[other] and abs(more[level] - more[other]) < doubt

    others = range(1, len(more))
    return more[:1] + [
        min(more[each] for each in others if each == level or is_as_fast(level, each))
        for level in others
    ]


def last_word(kept: Sequence[int], number: int, count: int) -> list[int]:
    """Return by level the nanoseconds that decide where regions cost the same.

    Keeping everything comes before all, then what keeps least. Of regions alike the first is to
    keep less than the next.

    Args:
        kept: bytes that the region keeps, by level.
        number: of the region.
        count: of all regions.

    Example:
        >>> [last_word([9, 4, 2, 4], number, 2) for number in (0, 1)]
        [[0, 5, 3, 7], [0, 7, 6, 8]]
    """
    order = sorted(range(1, len(kept)), key=lambda level: (-kept[level], -level))
    found = [0] * len(kept)
    for place, level in enumerate(order, 1):
        found[level] = place * (number + 1) + (len(order) - place) * (count + 1)
    return found
