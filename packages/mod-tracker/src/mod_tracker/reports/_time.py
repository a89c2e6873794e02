"""Time per module, from one clock reading at every change of the running module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from .._attribution import NOWHERE, OUTSIDE, Attribution
from .._errors import OptionError
from .._record import Call
from .._tracker import tracking
from ._phase_totals import PhaseTotals
from ._report import PhaseRow, Report, phase_rows


class TimeReport(Report[PhaseRow]):
    """Nanoseconds per module.

    In backward a module's time runs from the first node that made one of its outputs. What comes
    before the first module of a backward, the loss for example, is outside.
    """

    unit = "s"

    def show(self, value: int) -> str:
        """Return a time in the unit that fits."""
        for factor, unit in ((10**9, "s"), (10**6, "ms"), (10**3, "us")):
            if abs(value) >= factor:
                return f"{value / factor:.3g} {unit}"
        return f"{value} ns"


class Timeline:
    """Readings of a clock, each with the call that runs from then on.

    Follows the thread that made it, and the threads in which torch runs its backward.

    Args:
        attribution: where the thread is.
        read: reads the clock; cheap, and without waiting for a device.

    Attributes:
        readings: clock, call and phase.
        switch: takes a reading, if this thread is followed; the call it is given runs from here
            on. Returns whether one was taken. Made once for the timeline, and without a look at
            `self`: it is half of what a report of times costs.
    """

    def __init__(self, attribution: Attribution, read: Callable[[], Any]) -> None:
        self.readings: list[tuple[Any, Call, str]] = []
        thread, this_thread = threading.get_ident(), threading.get_ident
        append, state_of = self.readings.append, attribution.state

        def switch(call: Call, phase: str) -> bool:
            if this_thread() != thread:
                state = state_of()
                if state is not None and not state.inner:
                    return False
            append((read(), call, phase))
            return True

        self.switch = switch

    def start(self) -> None:
        """Take the first reading, and the last one."""
        self.switch(NOWHERE, OUTSIDE)


def totals_of(
    readings: list[tuple[Any, Call, str]], nanoseconds: Callable[[Any, Any], int]
) -> PhaseTotals:
    """Charge the time between two readings to the call that ran."""
    totals = PhaseTotals()
    for (begin, call, phase), (end, _, _) in pairwise(readings):
        totals.add(call[0], phase, nanoseconds(begin, end))
    return totals


def _cuda_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _cuda_nanoseconds(begin: Any, end: Any) -> int:
    return round(begin.elapsed_time(end) * 1_000_000)


@contextmanager
def profile_time(*roots: nn.Module, clock: Literal["cpu", "cuda"] = "cpu") -> Iterator[TimeReport]:
    """Measure how long each module runs in forward, recompute and backward.

    Args:
        roots: models to name before they are called; see `ModTracker`.
        clock: "cpu" is the wall clock of the host. "cuda" puts an event on the current stream at
            every change of module, and waits for the device once, at the end.

    Raises:
        OptionError: `clock` is not one of these, or "cuda" without a CUDA device.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> with profile_time() as report:
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> report.total == report.sum("self_total")
        True
    """
    if clock not in ("cpu", "cuda"):
        raise OptionError(
            f"mod_tracker.profile_time: clock {clock!r} is unknown, but it must be 'cpu' or "
            "'cuda'. Leave it out for 'cpu'."
        )
    if clock == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            "mod_tracker.profile_time: clock 'cuda' needs a CUDA device, but there is none. "
            "Use clock='cpu'."
        )
    report = TimeReport()
    on_device = clock == "cuda"
    with tracking(*roots) as tracker:
        line = Timeline(tracker._attribution, _cuda_event if on_device else time.perf_counter_ns)
        with tracker._listen_to_switches(line.switch):
            line.start()
            yield report
            line.start()
    if on_device:
        torch.cuda.synchronize()
    totals = totals_of(line.readings, _cuda_nanoseconds if on_device else lambda a, b: b - a)
    report.fill(phase_rows(totals), totals.total)
