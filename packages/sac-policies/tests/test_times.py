"""Times of steps, and the costs of levels computed from them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from sac_policies.budget import _measure
from sac_policies.budget._intervals import costs_of
from sac_policies.budget._measure import Marks

CPU = torch.device("cpu")
SIM: Any = getattr(torch, "simdev", None)


class Counted:
    """A clock that only the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        for name in ("thread_time_ns", "perf_counter_ns"):
            monkeypatch.setattr(time, name, lambda: self.ns)

    def adds(self, run: Any, ns: int) -> Any:
        """Return `run`, whose calls take this long."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.ns += ns
            return run(*args, **kwargs)

        return timed


def times_of(marks: Marks, step: Callable[[], object]) -> dict[Any, int]:
    """Nanoseconds by key."""
    return {each.key: each.ns for each in marks.intervals(step)}


def test_a_step_is_divided_at_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time before the first mark counts too; garbage collection is enabled again afterwards."""
    counted, marks = Counted(monkeypatch), Marks(CPU)
    collects: list[bool] = []

    def step() -> None:
        collects.append(gc.isenabled())
        for ns, key in [(5, "first"), (7, "second")]:
            counted.ns += ns
            marks.mark(key)
        counted.ns += 9

    assert times_of(marks, step) == {None: 5, "first": 7, "second": 9}
    assert [*collects, gc.isenabled()] == [False, True]


def test_garbage_is_collected_again_after_an_error() -> None:
    """It stays disabled if it was disabled before."""

    def step() -> None:
        raise KeyError

    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        try:
            with pytest.raises(KeyError):
                Marks(CPU).intervals(step)
            assert gc.isenabled() == collects
        finally:
            gc.enable()


def test_costs_are_over_the_plain_time() -> None:
    """For equal regions the median counts; no level is cheaper than keeping everything."""
    plain, slow = [1000, 1000, 9000], [3000, 9000, 3100]
    assert costs_of([plain, slow, [800, 800, 800]], [9, 5, 4]) == [0, 2101, 1]
    assert costs_of([plain, slow, [5000, 5000, 5000]], [9, 5, 4]) == [0, 2101, 4001]
    assert costs_of([[], [], []], [9, 5, 4]) == [0, 1, 1]


def test_levels_that_are_as_fast_cost_the_same() -> None:
    """Times within 2 % of the plain time count as equal, so the level that keeps less is chosen."""
    plain = [1000]
    assert costs_of([plain, [1300], [1320]], [9, 5, 4]) == [0, 301, 301]
    assert costs_of([plain, [1300], [1321]], [9, 5, 4]) == [0, 301, 322]
    assert costs_of([plain, [1320], [1300]], [9, 5, 4]) == [0, 321, 301]
    assert costs_of([plain, [1300], [1320]], [9, 4, 5]) == [0, 301, 321]
    assert costs_of([plain, [1001]], [9, 5]) == [0, 2]  # keeping everything is never merged


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The simulated device, on which a kernel takes 100 us of virtual time."""
    SIM.reset()
    SIM.simulate(virtual=True, kernel_us=100, copy_us=100)
    clock = SimpleNamespace(perf_counter_ns=lambda: round(SIM.host_us() * 1000))
    monkeypatch.setattr(_measure, "time", clock)
    yield torch.device("simdev", 0)
    SIM.reset()


class TestTimeOfADevice:
    """Times end when the device is done, not when the host has queued the work."""

    pytestmark: ClassVar = [
        pytest.mark.accelerator,
        pytest.mark.skipif(SIM is None, reason="needs the simulated device, whose time is known"),
    ]

    def test_intervals_take_as_long_as_their_kernels(self, virtual: torch.device) -> None:
        """One of two kernels, and one of one."""
        x, marks = torch.ones(4, device=virtual), Marks(virtual)

        def step() -> None:
            x.sin().cos()
            marks.mark("second")
            x.exp()

        assert times_of(marks, step) == {None: 200_000, "second": 100_000}
