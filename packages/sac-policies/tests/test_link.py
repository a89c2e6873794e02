"""Link rates are measured beside work, and give the bytes that a forward can hide."""

from __future__ import annotations

import pytest
import torch

from sac_policies.budget import Trace, TracedOp, TracedPack
from sac_policies.budget._link import (
    Direction,
    Link,
    NotMeasuredError,
    Timing,
    beside_on,
    measure_link,
)


class Simulated:
    """A simulated device: copies have a latency and a rate, and slow down the work."""

    def __init__(self, work: float = 0.1, out: float = 50e9, back: float = 40e9) -> None:
        self.work, self.rates = work, {"out": out, "back": back}
        self.latency, self.slows = 10e-6, {"out": 0.1, "back": 0.05}
        self.disturbed: list[float] = []
        self.sizes: list[int] = []

    def __call__(self, copied_bytes: int, direction: Direction) -> Timing:
        """Run the work beside a copy."""
        if not copied_bytes:
            return Timing(self.work, 0.0)
        self.sizes.append(copied_bytes)
        copy = self.latency + copied_bytes / self.rates[direction]
        if self.disturbed:
            copy *= self.disturbed.pop()
        return Timing(self.work + self.slows[direction] * copy, copy)


def test_rates_are_found() -> None:
    """In both directions, with the time of the work alone."""
    link = measure_link(Simulated(), most_bytes=1 << 34)
    assert link.out == pytest.approx(50e9, rel=0.01)
    assert link.back == pytest.approx(40e9, rel=0.01)
    assert link.work_seconds == 0.1


def test_copies_take_half_of_the_work() -> None:
    """A short copy is mostly latency; one longer than the work runs partly alone."""
    device = Simulated()
    measure_link(device, most_bytes=1 << 34)
    assert device.sizes[2] / 50e9 == pytest.approx(0.05, rel=0.02)
    assert device.sizes[5] / 40e9 == pytest.approx(0.05, rel=0.02)


def test_largest_copy_is_bounded() -> None:
    """The host may lack memory for a longer copy."""
    device = Simulated()
    measure_link(device, most_bytes=1 << 20)
    assert set(device.sizes) == {1 << 20}


def test_slow_rounds_do_not_count() -> None:
    """Other programs sometimes use the link."""
    device = Simulated()
    device.disturbed = [1.0, 1.0, 3.0, 1.0, 4.0, 2.0]
    link = measure_link(device, most_bytes=1 << 34)
    assert link.out == pytest.approx(50e9, rel=0.01)
    assert link.back == pytest.approx(40e9, rel=0.01)


def traced(*values: tuple[int, int]) -> Trace:
    """A block whose calls take these nanoseconds and save these bytes."""
    name = "aten.mm.default"
    ops = [TracedOp(name, n, size, cost, ()) for n, (cost, size) in enumerate(values)]
    packs = [TracedPack(name, n, 0, size) for n, (_, size) in enumerate(values)]
    return Trace("ns", tuple(ops), tuple(packs))


def hidden(link: Link, trace: Trace, input_bytes: int = 0) -> list[int]:
    """Numbers of the calls whose values are offloaded."""
    return [item.op for item in link.hidden(trace, input_bytes)]


SLOW = Link(out=1e9, back=1e9, work_seconds=100e-9)  # a byte per nanosecond, a forward of 100 ns


def test_values_fill_what_a_forward_hides() -> None:
    """Copies end exactly with the forward; one more byte does not fit."""
    assert hidden(SLOW, traced((50, 50), (50, 50))) == [0]
    assert hidden(SLOW, traced((50, 51), (50, 50))) == []
    assert hidden(SLOW, traced((25, 25), (25, 25), (25, 25), (25, 1))) == [0, 1, 2]


def test_values_made_late_do_not_leave_in_time() -> None:
    """The last value has no work left to hide its copy."""
    assert hidden(SLOW, traced((10, 1), (90, 1))) == [0]


def test_inputs_leave_first() -> None:
    """Inputs use part of the forward's time."""
    assert hidden(SLOW, traced((50, 40), (50, 1)), input_bytes=60) == [0]
    assert hidden(SLOW, traced((50, 40), (50, 1)), input_bytes=61) == []


def test_dear_values_come_first() -> None:
    """Values are ordered by saved work per byte."""
    assert hidden(SLOW, traced((10, 60), (30, 60), (60, 1))) == [1]


def test_slow_way_back_hides_less() -> None:
    """Copies back overlap with the backward of the next block, which takes two forwards."""
    values = traced((10, 40), (10, 30), (80, 1))
    assert hidden(SLOW, values) == [0, 1]
    assert hidden(Link(1e9, 0.34e9, 100e-9), values) == [1]


def test_times_are_those_of_the_forward() -> None:
    """Single operators are timed with synchronization, and take longer together."""
    values = traced((500, 50), (500, 50))
    assert hidden(SLOW, values) == [0]
    assert hidden(Link(1e9, 1e9, 50e-9), values) == []


def test_work_without_time_is_an_error() -> None:
    """Without measured work, no rate can be computed."""
    with pytest.raises(NotMeasuredError):
        measure_link(lambda size, direction: Timing(0.0, 0.0), most_bytes=1024)


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_link_of_an_accelerator_is_measured() -> None:
    """Copies run beside matmuls in both directions."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    x = torch.randn(256, 256, device=device)

    def work() -> None:
        y = x
        for _ in range(50):
            y = y @ x

    work()
    link = measure_link(beside_on(device, work), most_bytes=1 << 22)
    assert link.out > 0 and link.back > 0
    assert link.work_seconds > 0
