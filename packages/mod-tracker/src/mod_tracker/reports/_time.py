"""Time per module, from one reading of the clock at every change of the running module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from .._attribution import NOWHERE, OUTSIDE, Attribution
from .._errors import OptionError
from .._events import Listener
from .._names import walk
from .._record import Call
from .._torch_compat import buffers_of, parameters_of
from .._tracker import ModTracker
from ._report import WHOLE, Report, notes_on_compiled, nothing_called_note, reporting
from ._rows import PhaseRow, PhaseTotals, phase_rows, time_shown

Reading = tuple[Any, Call, str]
"""Clock, and the call and phase from then on."""


class TimeReport(Report[PhaseRow]):
    """Nanoseconds per module.

    In backward a module's time begins at the first node that created one of its outputs. Time
    before the first module of a backward, such as that of the loss, is outside.
    """

    unit = "s"
    title = "Time"
    scalar_unit: ClassVar[tuple[str, int]] = ("s", 10**9)

    def show(self, value: int) -> str:
        """Return a time in the unit that fits."""
        return time_shown(value)


class Timeline:
    """Readings of a clock, each with the call that runs from then on.

    Readings are taken in the thread that created this object, and in torch's backward threads.

    Args:
        attribution: of the tracker.
        read: reads the clock; must be cheap, and must not synchronize with a device.

    Attributes:
        readings: all readings.
        switch: called with the call and phase that run from now on. Takes a reading if this thread
            is measured, and returns whether it did. A closure, for speed: it is half of the cost of
            a time report.
    """

    def __init__(self, attribution: Attribution, read: Callable[[], Any]) -> None:
        self.readings: list[Reading] = []
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


def totals_of(readings: list[Reading], nanoseconds: Callable[[Any, Any], int]) -> PhaseTotals:
    """Add up the time between readings by the call that ran."""
    totals = PhaseTotals()
    for (begin, call, phase), (end, _, _) in pairwise(readings):
        totals.add(call[0].stack, phase, nanoseconds(begin, end))
    return totals


@reporting
def profile_time(*roots: nn.Module, clock: str = "cpu") -> Iterator[TimeReport]:
    """Measure how long each module runs in forward, recompute and backward.

    Args:
        roots: models to name before they are called; see `ModTracker`.
        clock: "cpu" is the wall clock of the host. "device", or the type of this machine's
            accelerator such as "cuda", records events on the current stream of one device and
            synchronizes once, at the end. The device is that of `roots`, or without roots the
            current one. Nothing is recorded during a graph capture, since nothing runs.

    Raises:
        OptionError: `clock` is not one of these, there is no such device, or `roots` are on
            several devices.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> with profile_time() as report:
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> report.total == report.sum("self_total")
        True
    """
    report = TimeReport()
    with ModTracker(*roots) as tracker:
        device = None if clock == "cpu" else _device_of(clock, roots)
        read = time.perf_counter_ns if device is None else _events_on(device)
        line = Timeline(tracker._attribution, read)
        with tracker._listening(Listener(switched=line.switch)):
            line.switch(NOWHERE, OUTSIDE)
            yield report
            line.switch(NOWHERE, OUTSIDE)
    if device is None:
        totals = totals_of(line.readings, lambda begin, end: end - begin)
    else:
        torch.accelerator.synchronize(device)
        readings = [reading for reading in line.readings if reading[0] is not None]
        totals = totals_of(readings, _nanoseconds_between)
    rows = phase_rows(totals, tracker._attribution)
    report.notes = notes_on_compiled(tracker._attribution, WHOLE) + nothing_called_note(rows)
    report._fill(rows, totals.total, {"total": totals.stacks})


def _device_of(clock: str, roots: tuple[nn.Module, ...]) -> torch.device:
    accelerator = torch.accelerator
    found = accelerator.current_accelerator() if accelerator.is_available() else None
    if found is None or clock not in ("device", found.type):
        what = "'cpu'" if found is None else f"'cpu', 'device' or {found.type!r}"
        here = ", since this machine has no accelerator" if found is None else ""
        raise OptionError(f"mod_tracker.profile_time: clock must be {what}{here}; got {clock!r}.")
    devices = {
        tensor.device
        for root in roots
        for _, module in walk(root)
        for tensor in (*parameters_of(module).values(), *buffers_of(module).values())
        if tensor is not None and tensor.device.type == found.type
    }
    if len(devices) > 1:
        raise OptionError(
            "mod_tracker.profile_time: one device is measured, and the model is on "
            f"{', '.join(sorted(map(str, devices)))}. Pass the part that is on one of them."
        )
    return next(iter(devices), torch.device(found.type, accelerator.current_device_index()))


def _events_on(device: torch.device) -> Callable[[], torch.Event | None]:
    """Return a function that records an event; during a graph capture it returns None."""
    module = getattr(torch, device.type, None)
    is_capturing = getattr(module, "is_current_stream_capturing", lambda: False)

    def read() -> torch.Event | None:
        if is_capturing():
            return None
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event

    return read


def _nanoseconds_between(begin: torch.Event, end: torch.Event) -> int:
    return round(begin.elapsed_time(end) * 1_000_000)
