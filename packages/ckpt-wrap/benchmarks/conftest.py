"""Side-by-side timing shared by the benchmarks of this package."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import pytest
import torch

torch.set_num_threads(1)

Calls = Mapping[str, Callable[[], object]]


def interleaved(calls: Calls, *, number: int, rounds: int) -> dict[str, float]:
    """Median thread-CPU time of one call of each candidate, microseconds.

    The candidates take turns within each round, so that a slow moment of the machine meets all.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time_ns()
            for _ in range(number):
                call()
            times[name].append((time.thread_time_ns() - start) / number / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


@pytest.fixture
def side_by_side(benchmark, capsys):
    """Time candidates against the first, print a table, and give the medians."""

    def run(calls: Calls, *, number: int = 300, rounds: int = 41) -> dict[str, float]:
        medians = benchmark.pedantic(
            interleaved, (calls,), {"number": number, "rounds": rounds}, rounds=1
        )
        first = next(iter(medians.values()))
        with capsys.disabled():
            print(f"\n{benchmark.name}")
            for name, value in medians.items():
                print(f"  {name:28}{value:10.2f} us  x{value / first:6.2f}  {value - first:+9.2f}")
        benchmark.extra_info.update(medians)
        return medians

    return run


@pytest.fixture
def figure(capsys):
    """Print a figure beside what it must be; a miss is said, not raised."""

    def show(what: str, got: float, *, must: float) -> None:
        with capsys.disabled():
            print(f"  {what}: {got:.2f}, must {must:.2f}{'' if got <= must else ' (missed)'}")

    return show
