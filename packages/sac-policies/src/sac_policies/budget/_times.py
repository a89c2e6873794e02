"""Measure the times of levels on the device of the step.

On the CPU the clock is per-thread CPU time, so other processes do not count; backward runs in the
calling thread. Garbage collection is disabled during a measurement. Times of equal regions are
combined, since a short disturbance hits only one of them.
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
_NEAR = 50
"""Levels are as fast as another within one part in so many of the plain time."""


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
        """Run a step; return the nanoseconds after each mark; None: before the first mark."""
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


def costs(spent: Sequence[Sequence[int]], kept: Sequence[int]) -> list[int]:
    """Return by level the extra nanoseconds of a region over the first level.

    A level that keeps less costs no more than another if it is at most 2 % of the plain time
    slower. Levels that checkpoint cost at least one nanosecond.

    Args:
        spent: by level, the nanoseconds of each of several equal regions.
        kept: bytes that a region keeps, by level.

    Example:
        >>> costs([[500, 500], [530, 550], [520, 520]], [9, 4, 2])
        [0, 41, 21]
        >>> costs([[500], [530], [540]], [9, 4, 2])
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
