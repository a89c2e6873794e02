"""A timeline of module calls in the Chrome trace-event format, for Perfetto.

Note [Slices]
At every change of the running call, slices are ended up to what the old and the new stack have in
common, and begun from there. So slices are nested and balanced whatever order a backward runs in,
and their times never decrease.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from .._attribution import NOWHERE, OUTSIDE
from .._errors import OptionError
from .._record import Call, root_of
from .._tracker import tracking
from ._allocations import AllocationMode
from ._report import phase_rows
from ._time import Timeline, TimeReport, totals_of

Event = dict[str, Any]
Frame = tuple[Call, str]


class TraceReport(TimeReport):
    """Time per module, and the events of the timeline.

    Attributes:
        events: trace events: "B" and "E" begin and end a slice, "C" is the memory counter. A
            forward slice and the backward slices of the same call have the same `args["call"]`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def to_json(self) -> str:
        """Return the timeline; Perfetto and chrome://tracing open it."""
        return json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"})


class Slices:
    """Turns changes of the running call into events. See Note [Slices].

    Args:
        begin: called with a name when a slice begins; for `record_function` and NVTX.
        end: called when the innermost slice ends.
    """

    def __init__(self, begin: Callable[[str], None], end: Callable[[], None]) -> None:
        self.events: list[Event] = []
        self._open: list[Frame] = []
        self._begin, self._end = begin, end
        self._origin = {"pid": os.getpid(), "tid": threading.get_native_id()}

    def switch(self, now_ns: int, call: Call, phase: str) -> None:
        """Let `call` run from `now_ns` on."""
        wanted = _frames(call, phase)
        common = 0
        for old, new in zip(self._open, wanted, strict=False):
            if old[0] is not new[0] or old[1] != new[1]:
                break
            common += 1
        while len(self._open) > common:
            self._write("E", now_ns, *self._close())
        for frame in wanted[common:]:
            self._begin(f"{frame[0][0].name} [{frame[1]}]")
            self._open.append(frame)
            self._write("B", now_ns, *frame)

    def close(self) -> None:
        """End what an interrupt has left open."""
        while self._open:
            self._close()

    def _close(self) -> Frame:
        # An interrupt before the end leaves the slice open, and so it is ended later.
        self._end()
        return self._open.pop()

    def count(self, now_ns: int, live_bytes: int) -> None:
        """Write the memory counter."""
        self._add("C", now_ns, name="memory", args={"live bytes": live_bytes})

    def _write(self, kind: str, now_ns: int, call: Call, phase: str) -> None:
        path, index, _ = call
        iteration = root_of(call)[1]
        args = {
            "call": f"{path.called_as}@{iteration}.{index}",
            "phase": phase,
            "iteration": iteration,
            "call_index": index,
        }
        self._add(kind, now_ns, name=path.name, cat=phase, args=args)

    def _add(self, kind: str, now_ns: int, **rest: Any) -> None:
        self.events.append({"ph": kind, "ts": now_ns / 1000, **self._origin, **rest})


def _frames(call: Call, phase: str) -> list[Frame]:
    frames: list[Frame] = []
    around: Call | None = call
    while around is not None and around[2] is not None:
        frames.append((around, phase))
        around = around[2]
    return frames[::-1]


class _Recorded:
    """`torch.profiler.record_function` ranges as a stack."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def begin(self, name: str) -> None:
        opened = torch.profiler.record_function(name)
        opened.__enter__()
        self._open.append(opened)

    def end(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


def _emitter(ranges: str | None) -> tuple[Callable[[str], None], Callable[[], None]]:
    if ranges is None:
        return lambda name: None, lambda: None
    if ranges == "record_function":
        recorded = _Recorded()
        return recorded.begin, recorded.end
    if ranges == "nvtx" and torch.cuda.is_available():
        return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    raise OptionError(
        f"mod_tracker.trace: ranges {ranges!r} cannot be emitted, but it must be None, "
        "'record_function', or, with a CUDA device, 'nvtx'. Leave it out for none."
    )


@contextmanager
def trace(
    *roots: nn.Module,
    memory: bool = True,
    ranges: Literal["record_function", "nvtx"] | None = None,
) -> Iterator[TraceReport]:
    """Write a timeline of the modules in forward, recompute and backward.

    Args:
        roots: models to name before they are called; see `ModTracker`.
        memory: follow allocations, too, for a counter of live bytes. This makes every operator
            slower; leave it off to compare times.
        ranges: emit every slice as a range for `torch.profiler`, or for NVTX, as well.

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
    slices = Slices(*_emitter(ranges))
    report = TraceReport()
    with ExitStack() as stack:
        tracker = stack.enter_context(tracking(*roots))
        line = Timeline(tracker._attribution, time.perf_counter_ns)

        def switch(call: Call, phase: str) -> None:
            if line.switch(call, phase):
                slices.switch(line.readings[-1][0], call, phase)

        def count(live_bytes: int) -> None:
            slices.count(time.perf_counter_ns(), live_bytes)

        stack.enter_context(tracker._listen_to_switches(switch))
        if memory:
            stack.enter_context(AllocationMode(tracker._attribution, changed=count))
        switch(NOWHERE, OUTSIDE)
        try:
            yield report
        finally:
            try:
                switch(NOWHERE, OUTSIDE)
            finally:
                slices.close()
    totals = totals_of(line.readings, lambda begin, end: end - begin)
    report.events = slices.events
    report.fill(phase_rows(totals), totals.total)
