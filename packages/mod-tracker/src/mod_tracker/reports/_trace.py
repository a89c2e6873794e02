"""A timeline of module calls in the Chrome trace-event format, for Perfetto.

At every change of the running call, the slices that the old and the new stack do not share end and
begin. So slices are nested and balanced in any order of backward, and their times never decrease.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from .._attribution import NOWHERE, OUTSIDE
from .._errors import OptionError
from .._events import Listener
from .._record import Call, root_of
from .._tracker import ModTracker
from ._allocations import AllocationMode, DeviceMemory, measuring_storages
from ._report import UNSEEN_BYTES, WHOLE, notes_on_compiled, nothing_called_note, reporting
from ._rows import phase_rows
from ._time import Timeline, TimeReport, totals_of

Event = dict[str, Any]
Frame = tuple[Call, str]
Edge = Callable[[int, Frame], object]


class TraceReport(TimeReport):
    """Time per module, and the events of the timeline."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] | None = []
        self._make: Callable[[], list[Event]] = list  # called at the first access

    @property
    def events(self) -> list[Event]:
        """Trace events: "B" and "E" begin and end a slice, "C" is the memory counter of a device.

        A forward slice and the backward slices of the same call have the same `args["call"]`.
        """
        self._refuse_difference("events", "timeline")
        if self._events is None:
            self._events = self._make()
        return self._events

    def to_json(self) -> str:
        """Return the timeline as JSON for Perfetto or chrome://tracing."""
        return json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"})


class Slices:
    """Turns changes of the running call into slices.

    Args:
        begin: called with nanoseconds and a frame when a slice begins.
        end: called with nanoseconds and a frame when the innermost slice ends.
    """

    def __init__(self, begin: Edge, end: Edge) -> None:
        self._open: list[Frame] = []
        self._begin, self._end = begin, end

    def switch(self, now_ns: int, call: Call, phase: str) -> None:
        wanted = _frames(call, phase)
        common = 0
        for old, new in zip(self._open, wanted, strict=False):
            if old[0] is not new[0] or old[1] != new[1]:
                break
            common += 1
        while len(self._open) > common:
            self._end(now_ns, self._open.pop())
        for frame in wanted[common:]:
            self._begin(now_ns, frame)
            self._open.append(frame)


def events_of(
    readings: list[tuple[int, Call, str]], live: list[tuple[int, str, int]]
) -> list[Event]:
    """Return slices and memory counter events in order of time.

    Args:
        readings: nanoseconds, and the call and phase from then on.
        live: nanoseconds, a device, and its live bytes from then on.
    """
    origin = {"pid": os.getpid(), "tid": threading.get_native_id()}
    events: list[Event] = []

    def write(kind: str, now_ns: int, frame: Frame) -> None:
        (path, index, _), phase = frame
        iteration = root_of(frame[0])[1]
        args = {
            "call": f"{path.called_as}@{iteration}.{index}",
            "phase": phase,
            "iteration": iteration,
            "call_index": index,
        }
        events.append(
            {"ph": kind, "ts": now_ns / 1000, **origin, "name": path.name, "cat": phase}
            | {"args": args}
        )

    slices = Slices(partial(write, "B"), partial(write, "E"))
    changes: list[Any] = [*readings, *live]
    for change in sorted(changes, key=lambda change: change[0]):
        if isinstance(change[1], str):
            now_ns, device, live_bytes = change
            events.append(
                {"ph": "C", "ts": now_ns / 1000, **origin, "name": f"memory of {device}"}
                | {"args": {"live bytes": live_bytes}}
            )
        else:
            slices.switch(*change)
    return events


def _frames(call: Call, phase: str) -> list[Frame]:
    frames: list[Frame] = []
    around: Call | None = call
    while around is not None and around[2] is not None:
        frames.append((around, phase))
        around = around[2]
    return frames[::-1]


def _emitter(ranges: str) -> Slices:
    if ranges == "record_function":
        opened: list[Any] = []

        def begin(name: str) -> None:
            opened.append(torch.profiler.record_function(name))
            opened[-1].__enter__()

        def end() -> None:
            opened.pop().__exit__(None, None, None)

    elif ranges == "nvtx" and torch.cuda.is_available():
        begin, end = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    else:
        raise OptionError(
            f"mod_tracker.trace: ranges must be None, 'record_function', or, with a CUDA device, "
            f"'nvtx'; got {ranges!r}."
        )
    return Slices(lambda _, frame: begin(f"{frame[0][0].name} [{frame[1]}]"), lambda *_: end())


@reporting
def trace(
    *roots: nn.Module,
    memory: bool = False,
    ranges: Literal["record_function", "nvtx"] | None = None,
) -> Iterator[TraceReport]:
    """Record a timeline of the modules in forward, recompute and backward.

    Args:
        roots: models to name before they are called; see `ModTracker`.
        memory: also record live bytes. A dispatch mode then sees every operator, so a step of
            small operators takes several times as long, and times include that.
        ranges: also emit every slice as a range for `torch.profiler`, or for NVTX.

    Raises:
        OptionError: `ranges` is not one of these, or "nvtx" without a CUDA device.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> with trace() as report:
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> [event["name"] for event in report.events if event["ph"] == "B"][:3]
        ['Sequential', 'Sequential.0', 'Sequential.1']
    """
    emitted = None if ranges is None else _emitter(ranges)
    report = TraceReport()
    live: list[tuple[int, str, int]] = []
    with ModTracker(*roots) as tracker:
        attribution = tracker._attribution
        line = Timeline(attribution, time.perf_counter_ns)

        def switch(call: Call, phase: str) -> None:
            if line.switch(call, phase) and emitted is not None:
                emitted.switch(*line.readings[-1])

        def count(memory: DeviceMemory) -> None:
            live.append((time.perf_counter_ns(), memory.device, memory.live))

        listener = line.switch if emitted is None else switch
        mode = AllocationMode(attribution, changed=count) if memory else None
        follow = nullcontext() if mode is None else measuring_storages(mode)
        with tracker._listening(Listener(switched=listener)), follow:
            switch(NOWHERE, OUTSIDE)
            try:
                yield report
            finally:
                switch(NOWHERE, OUTSIDE)
    totals = totals_of(line.readings, lambda begin, end: end - begin)
    report._events, report._make = None, partial(events_of, line.readings, live)
    rows = phase_rows(totals, attribution)
    missing, functions = (
        (WHOLE, ()) if mode is None else (f"{WHOLE}, {UNSEEN_BYTES}", mode.compiled_in)
    )
    report.notes = notes_on_compiled(attribution, missing, functions) + nothing_called_note(rows)
    report._fill(rows, totals.total, {"total": totals.stacks})
