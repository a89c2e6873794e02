"""Times of steps, one way after the other in rounds that turn.

What is compared is a step with that of the first way in the same round: a machine that gets slower
in between does not decide. On the CPU it is the thread's own time, without what others take.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

CPU = torch.device("cpu")


def seconds_of(step: Callable[[], object], device: torch.device = CPU) -> float:
    """What a step takes; garbage is collected before or after it, not in it."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    gc.disable()
    _wait(device)
    began = clock()
    step()
    _wait(device)
    spent = clock() - began
    gc.enable()
    return spent


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def in_turn(clocked: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Measure each in turn, in so many rounds whose order alternates."""
    times: list[list[float]] = [[] for _ in clocked]
    order = list(range(len(clocked)))
    for _ in range(rounds):
        for at in order:
            times[at].append(clocked[at]())
        order.reverse()
    return times


def over_the_first(times: Sequence[Sequence[float]]) -> list[float]:
    """The median of each one's ratio to the first in the same round."""
    return [
        round(statistics.median(own / none for own, none in zip(each, times[0], strict=True)), 3)
        for each in times
    ]
