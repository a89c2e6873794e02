"""What a level costs is what it costs in training, and repeats say how well that is known."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from sac_policies import fit_
from sac_policies.budget import InPlaceFit, _times
from sac_policies.budget._times import Clock, are_long, clocked_in_rounds, costs, last_word

from ._blocks import stack
from ._fitted import BATCH

CPU = torch.device("cpu")
MS = 1_000_000
SIM: Any = getattr(torch, "simdev", None)


class Counted:
    """A clock that goes on by what is said, and not of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        for name in ("thread_time_ns", "perf_counter_ns"):
            monkeypatch.setattr(time, name, lambda: self.ns)

    def adds(self, run: Any, ns: int) -> Any:
        """What a call of `run` takes."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.ns += ns
            return run(*args, **kwargs)

        return timed


def test_a_step_is_divided_at_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before the first is there, too; garbage is collected again behind it."""
    counted, clock = Counted(monkeypatch), Clock(CPU)
    collects: list[bool] = []

    def step() -> None:
        collects.append(gc.isenabled())
        for ns, key in [(5, "first"), (7, "second")]:
            counted.ns += ns
            clock.mark(key)
        counted.ns += 9

    assert clock.spent(step) == {None: 5, "first": 7, "second": 9}
    assert [*collects, gc.isenabled()] == [False, True]


def test_garbage_is_collected_again_after_an_error() -> None:
    """And not where nobody collected before."""

    def step() -> None:
        raise KeyError

    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        try:
            with pytest.raises(KeyError):
                Clock(CPU).spent(step)
            assert gc.isenabled() == collects
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("took_ms", "rounds"), [(1, 5), (16, 5), (21, 4), (40, 3), (50, 2), (99, 2)]
)
def test_levels_are_clocked_in_turn(took_ms: int, rounds: int) -> None:
    """Backwards in every other round; at least twice, and no more often once that took long."""
    order: list[int] = []

    def clocked(level: int) -> dict[Any, int]:
        order.append(level)
        return {None: 0, (0, 0, True): took_ms * MS}

    found = clocked_in_rounds(3, clocked)
    assert order == ([0, 1, 2, 2, 1, 0] * 3)[: 3 * rounds]
    assert [len(own) for own in found] == [rounds] * 3


def test_steps_are_long_where_a_round_of_them_is() -> None:
    """A quarter of a second, the profiler's part included."""
    assert not are_long([{None: 80 * MS, (0, 0, True): 5 * MS}, {None: 100 * MS}])
    assert are_long([{None: 80 * MS, (0, 0, True): 90 * MS}, {None: 100 * MS}])


def test_the_fastest_round_counts() -> None:
    """And of regions alike the middle one; no level is faster than keeping everything."""
    plain = [[10, 10, 10], [10, 90, 90]]
    assert costs([plain, [[30, 90, 31], [99, 99, 99]], 2 * [[8, 8, 8]]], [9, 5, 4]) == [0, 21, 0]
    assert costs([[], [], []], [9, 5, 4]) == [0, 0, 0]


def test_levels_that_repeats_do_not_tell_apart_cost_the_same() -> None:
    """So that the one is taken that keeps less, whichever is faster."""
    plain, slower = [[10], [10]], [[40], [45]]
    assert costs([plain, slower, [[43], [43]]], [9, 5, 4]) == [0, 30, 30]
    assert costs([plain, [[43], [43]], slower], [9, 4, 5]) == [0, 30, 30]
    assert costs([plain, slower, [[43], [43]]], [9, 4, 5]) == [0, 30, 33]
    assert costs([plain, slower, [[45], [45]]], [9, 5, 4]) == [0, 30, 35]
    assert costs([plain, slower, [[43], [48]]], [9, 5, 4]) == [0, 30, 33]  # in both rounds by 3
    assert costs([[[10], [50]], [[11], [11]]], [9, 5]) == [0, 1]  # keeping everything is apart


def test_a_round_that_was_disturbed_makes_levels_no_more_alike() -> None:
    """One level slower by 3 in all rounds but one, in which others' work hit it, or the other."""
    plain, slower = [[10]] * 4, [[40], [41], [40], [41]]
    for disturbed in ([[43], [44], [90], [44]], [[43], [44], [13], [44]]):
        assert costs([plain, slower, disturbed], [9, 5, 4])[1] == 30
    assert costs([plain, slower, [[43], [44], [90], [44]]], [9, 5, 4]) == [0, 30, 33]
    assert costs([plain[1:], slower[1:], [[44], [90], [44]]], [9, 5, 4]) == [0, 30, 30]


def test_what_keeps_less_has_the_last_word() -> None:
    """Where times are the same; and of regions alike the first keeps less."""
    kept, count = [9, 5, 4, 7], 3
    words = [last_word(kept, number, count) for number in range(count)]
    for own in words:
        assert own[0] == 0 < own[2] < own[1] < own[3]
    for one, other in itertools.combinations(words, 2):
        assert one[2] + other[1] < one[1] + other[2]


def test_long_steps_are_clocked_while_their_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that eleven steps are all: others would be waited for."""
    counted = Counted(monkeypatch)
    model, watched = stack(), []
    forward = model.forward

    def long(*args: Any, **kwargs: Any) -> Any:
        watched.append(torch.autograd._profiler_enabled())
        counted.ns += 300 * MS
        return forward(*args, **kwargs)

    model.forward = long
    found = fit_(model, BATCH, "50%")
    assert isinstance(found, InPlaceFit)
    assert watched.count(False) == 4
    assert len(watched) <= 11
    found.undo()


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The simulated device, on which a kernel takes 100 us, by the clock too."""
    SIM.reset()
    SIM.simulate(virtual=True, kernel_us=100, copy_us=100)
    clock = SimpleNamespace(perf_counter_ns=lambda: round(SIM.host_us() * 1000))
    monkeypatch.setattr(_times, "time", clock)
    yield torch.device("simdev", 0)
    SIM.reset()


class TestTimeOfADevice:
    """Ends where the device is done, and not where the host has asked for it."""

    pytestmark: ClassVar = [
        pytest.mark.accelerator,
        pytest.mark.skipif(SIM is None, reason="needs the simulated device, whose time is known"),
    ]

    def test_intervals_take_as_long_as_their_kernels(self, virtual: torch.device) -> None:
        """One of two kernels, and one of one."""
        x, clock = torch.ones(4, device=virtual), Clock(virtual)

        def step() -> None:
            x.sin().cos()
            clock.mark("second")
            x.exp()

        assert clock.spent(step) == {None: 200_000, "second": 100_000}
