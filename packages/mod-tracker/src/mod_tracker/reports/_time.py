"""Time per module, from one clock reading at every change of the running module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn

from .._attribution import NOWHERE, OUTSIDE, Attribution
from .._errors import OptionError
from .._listeners import Listener
from .._names import walk
from .._numbers import time_shown
from .._record import Call
from .._tracker import ModTracker
from ._compiled import WHOLE, compiled_note, nothing_called_note
from ._device_time import DeviceTimelines, accelerator_kind, totals_of
from ._phase_totals import PhaseTotals
from ._report import PhaseRow, Report, phase_rows


class TimeReport(Report[PhaseRow]):
    """Nanoseconds per module.

    In backward a module's time begins at the first node that made one of its outputs. Time before
    the first module of a backward, such as that of the loss, is outside.

    Attributes:
        by_device: nanoseconds of each device, such as "cuda:0"; {} with the host's clock.
    """

    unit = "s"
    title = "Time"
    scalar_unit: ClassVar[tuple[str, int]] = ("s", 10**9)

    def __init__(self) -> None:
        super().__init__()
        self.by_device: dict[str, int] = {}

    def show(self, value: int) -> str:
        """Return a time in the unit that fits."""
        return time_shown(value)


class Timeline:
    """Readings of a clock, each with the call that runs from then on.

    Readings are taken in the thread that created this, and in torch's backward threads.

    Args:
        attribution: of the tracker.
        read: reads the clock; must be cheap, and must not wait for a device.

    Attributes:
        readings: clock, call and phase.
        switch: called with the call and phase that run from now on; takes a reading if this thread
            is followed, and returns whether it did. A closure, since it is half of the cost of a
            report of times.
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


@contextmanager
def profile_time(*roots: nn.Module, clock: str = "cpu") -> Iterator[TimeReport]:
    """Measure how long each module runs in forward, recompute and backward.

    Args:
        roots: models to name before they are called; see `ModTracker`.
        clock: "cpu" is the wall clock of the host. "device", or the type of this machine's
            accelerators such as "cuda", uses events on the current stream of every device with
            parameters or buffers of the modules, and waits for the devices once, at the end. Times
            of several devices are added; `TimeReport.by_device` has each.

    Raises:
        OptionError: `clock` is not one of these, or there is no such device.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> with profile_time() as report:
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> report.total == report.sum("self_total")
        True
    """
    kind = None if clock == "cpu" else _kind_of(clock)
    report = TimeReport()
    with ModTracker(*roots) as tracker:
        if kind is None:
            line = Timeline(tracker._attribution, time.perf_counter_ns)
            with tracker._listen(Listener(switched=line.switch)):
                line.switch(NOWHERE, OUTSIDE)
                yield report
                line.switch(NOWHERE, OUTSIDE)
            totals = totals_of(line.readings, lambda begin, end: end - begin)
        else:
            lines = DeviceTimelines(tracker._attribution, kind)
            for module in (module for root in roots for _, module in walk(root)):
                lines.use_those_of(module)
            with tracker._listen(Listener(switched=lines.switch)):
                yield report
            totals = PhaseTotals()
            for index, found in sorted(lines.finish().items()):
                totals.add_all(found)
                report.by_device[f"{kind}:{index}"] = found.total
    rows = phase_rows(totals)
    report.notes = compiled_note(tracker._attribution, WHOLE) + nothing_called_note(rows)
    report._fill(rows, totals.total, {"total": totals.stacks})


def _kind_of(clock: str) -> str:
    there = accelerator_kind()
    if there is None or clock not in ("device", there):
        what = "'cpu'" if there is None else f"'cpu', 'device' or {there!r}"
        here = "; there is no accelerator here" if there is None else ""
        raise OptionError(f"mod_tracker.profile_time: clock must be {what}{here}; got {clock!r}.")
    return there
