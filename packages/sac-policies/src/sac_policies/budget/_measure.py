"""Measures the memory and time that a step takes between marks.

`Marks` divides a step, and a source observes it: the CPU profiler and the fake tensors of `plan`
list allocations, from which `accounted` makes intervals; an accelerator has totals.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.profiler import profile, record_function

from .._errors import BudgetError
from .._torch_compat import storage_bytes, storage_key
from ..eager._moved import counters, measured

_LOG_LEVEL = "KINETO_LOG_LEVEL"
_MARK = "sac_policies.mark"


Key = tuple[int, int, bool | None]
"""Number of a region, number of its call, whether it is in backward; None after its forward."""


@dataclass(frozen=True)
class Interval:
    """Memory and time between one mark and the next.

    Attributes:
        key: of the mark; None before the first.
        grown: bytes in use at its end, minus those at its start.
        most: peak bytes in use, minus those at its start; at least 0.
        ns: nanoseconds that it took.
        away: bytes that were copied to the host.
        gradients: bytes of parameters' gradients in `grown` and in `most`; 0 from an accelerator.
        logits: bytes of logits and loss in `grown` and in `most`: memory of the tail; 0 from an
            accelerator.
    """

    key: Any
    grown: int
    most: int
    ns: int = 0
    away: int = 0
    gradients: tuple[int, int] = (0, 0)
    logits: tuple[int, int] = (0, 0)

    @property
    def region(self) -> int | None:
        """Number of its region, if its key is a `Key`."""
        return self.key[0] if isinstance(self.key, tuple) else None


def tail_of(keys: Iterable[Any]) -> Key | None:
    """Return the key of the tail, which begins after the last forward of a region.

    Example:
        >>> tail_of([None, (0, 0, False), (0, 0, None), "backward", (0, 0, True)])
        (0, 0, None)
    """
    ends = [key for key in keys if isinstance(key, tuple) and key[-1] is None]
    return ends[-1] if ends else None


Event = tuple[int, int | None] | int
"""Address and bytes of an allocation, or of a release as a negative number. With None, the memory
there is a parameter's gradient. A mark is its time in nanoseconds."""


class Source(Protocol):
    """Observes the memory and time of a step."""

    def mark(self) -> None:
        """Note the end of an interval and the beginning of the next."""

    def intervals(self, step: Callable[[], object], keys: Sequence[Any]) -> list[Interval]:
        """Run a step that begins and ends with a mark; return the intervals between marks.

        Args:
            step: the step.
            keys: keys of the intervals, complete when the step has run.
        """


class Marks:
    """Divides the memory and time of a step at marks.

    Args:
        source: the source, or the device where the step allocates: a CPU, or an accelerator with
            CUDA's memory statistics.
    """

    def __init__(self, source: Source | torch.device) -> None:
        if isinstance(source, torch.device):
            source = ProfiledCpu() if source.type == "cpu" else Totals(source)
        self._source = source
        self._keys: list[Any] = [None]

    def mark(self, key: Any) -> None:
        """Begin an interval."""
        self._keys.append(key)
        self._source.mark()

    def intervals(self, step: Callable[[], object]) -> list[Interval]:
        """Run a step; return the memory and time of each interval between marks.

        Memory from before that the step frees is left out, except on an accelerator.
        """

        def divided() -> None:
            self._source.mark()
            step()
            self._source.mark()

        with no_collection():
            return self._source.intervals(divided, self._keys)


class ProfiledCpu:
    """Memory of the CPU, with temporaries inside operators.

    The clock is the thread's CPU time, so other processes do not count; it includes the profiler's.
    Backward runs in the calling thread.
    """

    def __init__(self) -> None:
        self._times: list[int] = []

    def mark(self) -> None:
        with record_function(_MARK):
            pass
        self._times.append(time.thread_time_ns())

    def intervals(self, step: Callable[[], object], keys: Sequence[Any]) -> list[Interval]:
        # In torch 2.11, `torch.profiler` warns unless it creates an object per event.
        with _quiet(), profile(profile_memory=True, use_kineto=True) as profiler:
            step()
        return accounted(_events(profiler, self._times), keys)


class Totals:
    """Bytes in use of an accelerator, and their peak; it is synchronized at each mark."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, getattr(torch, device.type)
        self._samples: list[_Sample] = []

    def mark(self) -> None:
        memory, device = self._memory, self._device
        memory.synchronize(device)
        now, most = memory.memory_allocated(device), memory.max_memory_allocated(device)
        self._samples.append(_Sample(time.perf_counter_ns(), now, most, counters.bytes_out))
        memory.reset_peak_memory_stats(device)

    def intervals(self, step: Callable[[], object], keys: Sequence[Any]) -> list[Interval]:
        with measured():
            step()
        return [
            Interval(
                key,
                end.now - start.now,
                max(0, end.most - start.now),
                end.ns - start.ns,
                end.away - start.away,
            )
            for key, (start, end) in zip(keys, pairwise(self._samples), strict=True)
        ]


class _Sample(NamedTuple):
    """Time, bytes in use, their peak since the last mark, and bytes copied to the host so far."""

    ns: int
    now: int
    most: int
    away: int


@contextmanager
def no_collection() -> Iterator[None]:
    """Delay garbage collection."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def highest(intervals: Iterable[Interval]) -> int:
    """Return the peak, counted from the bytes before the first interval.

    Example:
        >>> highest([Interval(None, 8, 16), Interval("block", -8, 12)])
        20
    """
    now = top = 0
    for each in intervals:
        top = max(top, now + each.most)
        now += each.grown
    return top


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of an accelerator, with those cached by the allocator.

    Raises:
        BudgetError: the device is not an accelerator that reports its free memory.
    """
    memory: Any = None if device.type == "cpu" else getattr(torch, device.type, None)
    if not hasattr(memory, "mem_get_info"):
        raise BudgetError(
            f"sac_policies.fit_: budget 'device' is the memory that is free on the model's "
            f"accelerator, but the model's device {str(device)!r} has no such number. Pass bytes, "
            'for example "6 GiB", or a share.'
        )
    free, _ = memory.mem_get_info(device)
    return int(free + memory.memory_reserved(device) - memory.memory_allocated(device))


def bytes_of(tensors: Iterable[torch.Tensor | None], *, device: torch.device | None = None) -> int:
    """Return bytes of the tensors' storages, shared ones counted once.

    Args:
        tensors: some tensors.
        device: where they count; by default, anywhere.

    Example:
        >>> x = torch.ones(100)
        >>> bytes_of([x, x[10:], None], device=x.device)
        400
    """
    here = [each for each in tensors if each is not None and device in (None, each.device)]
    return sum({storage_key(each): storage_bytes(each) for each in here}.values())


def _events(profiler: profile, times: Iterable[int]) -> list[Event]:
    """Return what a profile recorded, with the times of its marks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found: list[tuple[float, Event | None]] = []
    for event in events:
        name, args = event.get("name", ""), event.get("args", {})
        if name == "[memory]" and not args.get("Device Type"):  # of the CPU
            found.append((event["ts"], (args["Addr"], args["Bytes"])))
        elif name == _MARK:
            found.append((event["ts"], None))
    found.sort(key=lambda each: each[0])
    marks = iter(times)
    return [next(marks) if event is None else event for _, event in found]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the profiler's messages, unless the environment asks for them.

    The profiler reads the variable at its first use in a process.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "6"  # a higher level than its messages of every step
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


_OTHER, _GRADIENTS, _LOGITS = range(3)


def accounted(events: Iterable[Event], keys: Sequence[Any]) -> list[Interval]:
    """Return the intervals between the marks among the events.

    Args:
        events: with one mark more than there are keys.
        keys: keys of the intervals.

    Example:
        >>> events = [0, (1, 8), (9, -64), (1, -8), (2, 8), 30, (1, 16), (2, -8), 40]
        >>> [(each.grown, each.most, each.ns) for each in accounted(events, "ab")]
        [(8, 8, 30), (8, 16, 10)]
    """
    at_tail = len(keys) if (tail := tail_of(keys)) is None else keys.index(tail)
    alive: dict[int, tuple[int, int]] = {}  # by address: bytes and cause
    found: list[Interval] = []
    number, began, now, top = -1, 0, [0, 0, 0], [0, 0, 0]
    for event in events:
        if isinstance(event, int):
            if number >= 0:
                causes = list(zip(now, top, strict=True))[_GRADIENTS:]
                own = sum(now), sum(top), event - began, 0
                found.append(Interval(keys[number], *own, *causes))
            number, began, now, top = number + 1, event, [0, 0, 0], [0, 0, 0]
            continue
        address, grown = event
        size, cause = alive.pop(address, (0, _OTHER))
        now[cause] -= size
        if grown is None:
            now[_GRADIENTS] += size
            alive[address] = size, _GRADIENTS
            continue
        if grown > 0:
            cause = _LOGITS if number == at_tail else _OTHER
            alive[address] = grown, cause
            now[cause] += grown
            top = [*now] if sum(now) > sum(top) else top
    return found
