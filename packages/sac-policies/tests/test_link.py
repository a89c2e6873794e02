"""A link is measured beside work, and says how much a forward hides."""

from __future__ import annotations

import pytest
import torch

from sac_policies import BudgetError
from sac_policies.budget._link import Direction, Link, Timing, beside_on, measure_link


class Simulated:
    """A device on a clock of its own: copies have a latency and a rate, and slow down the work."""

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


def test_rates_and_slowdowns_are_found() -> None:
    """Both directions, and what each costs the work beside it."""
    link = measure_link(Simulated(), most_bytes=1 << 34)
    assert link.out == pytest.approx(50e9, rel=0.01)
    assert link.back == pytest.approx(40e9, rel=0.01)
    assert link.slows_out == pytest.approx(0.1, rel=1e-6)
    assert link.slows_back == pytest.approx(0.05, rel=1e-6)


def test_copies_take_half_of_the_work() -> None:
    """A short copy is mostly latency, and one longer than the work runs partly alone."""
    device = Simulated()
    measure_link(device, most_bytes=1 << 34)
    assert device.sizes[2] / 50e9 == pytest.approx(0.05, rel=0.02)
    assert device.sizes[5] / 40e9 == pytest.approx(0.05, rel=0.02)


def test_largest_copy_is_bounded() -> None:
    """The host may not have the memory for a longer one."""
    device = Simulated()
    measure_link(device, most_bytes=1 << 20)
    assert set(device.sizes) == {1 << 20}


def test_slow_rounds_do_not_count() -> None:
    """Other programs use the link now and then."""
    device = Simulated()
    device.disturbed = [1.0, 1.0, 3.0, 1.0, 4.0, 2.0]
    link = measure_link(device, most_bytes=1 << 34)
    assert link.out == pytest.approx(50e9, rel=0.01)
    assert link.back == pytest.approx(40e9, rel=0.01)


def test_hidden_bytes_are_those_that_leave_and_return_in_time() -> None:
    """The narrower of forward and backward decides."""
    link = Link(out=10.0, back=5.0)
    assert link.hidden_bytes(2.0, 10.0) == 20
    assert link.hidden_bytes(2.0, 3.0) == 15
    assert link.hidden_bytes(-1.0, 3.0) == 0
    assert link.lead_seconds(10) == 2.0


def test_work_without_time_is_an_error() -> None:
    """Nothing can be said of a copy beside nothing."""
    with pytest.raises(BudgetError, match="too short to measure"):
        measure_link(lambda size, direction: Timing(0.0, 0.0), most_bytes=1024)


def test_cpu_has_no_link() -> None:
    """Its memory is the host's."""
    with pytest.raises(BudgetError, match="device 'cpu' is not an accelerator"):
        beside_on(torch.device("cpu"), bool)


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
    assert link.hidden_bytes(1.0, 1.0) > 0
