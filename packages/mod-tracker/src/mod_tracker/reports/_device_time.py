"""Clocks of accelerators: one list of readings for each device that modules run on.

Note [Clocks of devices]
Rule 1: a device is measured from the first module on that has a parameter or a buffer there. A
        reading is an event on its current stream; the host waits for it at the end only. Modules
        may move, so devices are looked up again when an outermost module is called. During graph
        capture the clock is not read: nothing runs, and the event would have no time.
Rule 2: a change of module in a user's thread is a reading on all devices. In a backward thread of
        torch, which belongs to one device, it is a reading on that device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .._attribution import FORWARD, NOWHERE, OUTSIDE, Attribution
from .._record import Call, Path
from .._torch_compat import NO_TASK, buffers_of, graph_task, parameters_of
from ._phase_totals import PhaseTotals

Reading = tuple[Any, Call, str]


def totals_of(readings: list[Reading], nanoseconds: Callable[[Any, Any], int]) -> PhaseTotals:
    """Add up the time between readings by the call that ran."""
    totals = PhaseTotals()
    for (begin, call, phase), (end, _, _) in pairwise(readings):
        totals.add(call[0].stack, phase, nanoseconds(begin, end))
    return totals


class DeviceTimelines:
    """Readings of all devices of one type, such as "cuda"."""

    def __init__(self, attribution: Attribution, kind: str) -> None:
        self._attribution, self._kind = attribution, kind
        self._thread = threading.get_ident()
        self._readings: dict[int, list[Reading]] = {}
        self._seen: set[Path] = set()
        self._outermost: Call | None = None
        self._now: tuple[Call, str] = (NOWHERE, OUTSIDE)
        self._is_capturing: Callable[[], bool] = getattr(
            getattr(torch, kind, None), "is_current_stream_capturing", lambda: False
        )

    def use(self, index: int) -> None:
        if index not in self._readings:
            self._readings[index] = []
            self._read(index, *self._now)

    def use_those_of(self, module: nn.Module) -> None:
        for tensor in (*parameters_of(module).values(), *buffers_of(module).values()):
            if tensor is not None and tensor.device.type == self._kind:
                self.use(tensor.device.index or 0)

    def switch(self, call: Call, phase: str) -> None:
        """Take readings: `call` runs from now on. See Rule 2."""
        path = call[0]
        if len(path.stack) == 1 and phase is FORWARD and call is not self._outermost:
            self._outermost = call
            self._seen.clear()
        if path not in self._seen:
            self._seen.add(path)
            module = path.module()
            if module is not None:
                self.use_those_of(module)
        if threading.get_ident() == self._thread:
            self._now = call, phase
            for index in list(self._readings):  # another thread may add one meanwhile
                self._read(index, call, phase)
            return
        state = self._attribution.state()
        if graph_task() != NO_TASK and (state is None or state.inner):
            index = torch.accelerator.current_device_index()
            self.use(index)
            self._read(index, call, phase)

    def finish(self) -> dict[int, PhaseTotals]:
        """Take the last readings, wait for the devices, and return nanoseconds by device."""
        self.switch(NOWHERE, OUTSIDE)
        found = {}
        for index, readings in self._readings.items():
            torch.accelerator.synchronize(index)
            found[index] = totals_of(
                readings, lambda begin, end: round(begin.elapsed_time(end) * 1_000_000)
            )
        return found

    def _read(self, index: int, call: Call, phase: str) -> None:
        device = torch.device(self._kind, index)
        if index == torch.accelerator.current_device_index() and self._is_capturing():
            return
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        self._readings[index].append((event, call, phase))


def accelerator_kind() -> str | None:
    """Return the type of this machine's accelerators, such as "cuda"; None if there is none."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type
