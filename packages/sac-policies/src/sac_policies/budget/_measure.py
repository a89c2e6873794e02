"""Measures the memory and time that a step takes between marks."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile, record_function

from .._errors import BudgetError
from .._torch_compat import storage_bytes as bytes_under
from .._torch_compat import storage_key
from ..eager._moved import counters, measured

_LOG_LEVEL = "KINETO_LOG_LEVEL"
_MARK = "sac_policies.mark:"


class Moved(NamedTuple):
    """Bytes that went to host memory and came back.

    Attributes:
        out: copied to the host.
        back: copied back.
        unread: copied back and freed without being read.
    """

    out: int = 0
    back: int = 0
    unread: int = 0


_NOTHING = Moved()


@dataclass(frozen=True)
class Interval:
    """Memory and time between one mark and the next.

    Attributes:
        key: of the mark; None before the first.
        grown: bytes in use at its end, minus those at its start.
        most: peak bytes in use, minus those at its start; at least 0.
        freed: on CPU, bytes of earlier intervals that it freed, by number of the interval.
        moved: bytes that were offloaded.
        ns: nanoseconds that it took.
    """

    key: Any
    grown: int
    most: int
    freed: Mapping[int, int] | None = None
    moved: Moved = _NOTHING
    ns: int = 0


class Marks:
    """Divides the memory and time of a step at marks.

    On the CPU the clock is the thread's CPU time, so other processes do not count; backward runs in
    the calling thread. An accelerator is synchronized at each mark.

    Args:
        device: where the step allocates; CPU, or an accelerator with CUDA's memory statistics.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keys: list[Any] = [None]
        self._read: list[_Reading] = []
        self._memory = None if device.type == "cpu" else getattr(torch, device.type)

    def mark(self, key: Any) -> None:
        """Begin an interval."""
        if self._memory is None:
            with record_function(f"{_MARK}{len(self._keys)}"):
                pass
        self._keys.append(key)
        self._note()

    def intervals(self, step: Callable[[], object]) -> list[Interval]:
        """Run a step; return the memory and time of each interval between marks.

        Temporaries inside operators count. On CPU, memory from before that the step frees is left
        out, and times include the profiler's.
        """

        def noted() -> None:
            with no_collection():
                self._note()
                step()
                self._note()

        if self._memory is None:
            sizes = _divided(_changes(noted))
        else:
            with measured():
                noted()
            sizes = [
                (end.now - start.now, max(0, end.most - start.now), None)
                for start, end in pairwise(self._read)
            ]
        return [
            Interval(key, *size, Moved(*map(sub, end.moved, start.moved)), end.ns - start.ns)
            for key, size, (start, end) in zip(
                self._keys, sizes, pairwise(self._read), strict=False
            )
        ]

    def _note(self) -> None:
        """Record the time, and on accelerators bytes in use, their peak, and copies."""
        memory, device = self._memory, self._device
        if memory is None:
            self._read.append(_Reading(time.thread_time_ns()))
            return
        memory.synchronize(device)
        moved = Moved(counters.bytes_out, counters.bytes_in, counters.bytes_unread)
        now, most = memory.memory_allocated(device), memory.max_memory_allocated(device)
        self._read.append(_Reading(time.perf_counter_ns(), now, most, moved))
        memory.reset_peak_memory_stats(device)


class _Reading(NamedTuple):
    """Time, bytes in use, their peak since the last reading, and copies so far."""

    ns: int
    now: int = 0
    most: int = 0
    moved: Moved = _NOTHING


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


def storage_bytes(tensors: Iterable[torch.Tensor | None], *, device: torch.device) -> int:
    """Return bytes of the tensors' storages on `device`, shared ones counted once.

    Example:
        >>> x = torch.ones(100)
        >>> storage_bytes([x, x[10:], None], device=x.device)
        400
    """
    here = [each for each in tensors if each is not None and each.device == device]
    return sum({storage_key(each): bytes_under(each) for each in here}.values())


def _changes(step: Callable[[], object]) -> list[tuple[int, int] | None]:
    """Address and bytes of each allocation (positive) and release (negative) on the CPU.

    Marks are None.
    """
    # `torch.profiler` is not used: in torch 2.11 it warns unless it creates an object per event.
    with _quiet(), profile(profile_memory=True, use_kineto=True) as profiler:
        step()
    with no_collection():  # these events would trigger many collections
        return _read(profiler)


def _read(profiler: profile) -> list[tuple[int, int] | None]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found: list[tuple[float, tuple[int, int] | None]] = []
    for event in events:
        name, args = event.get("name", ""), event.get("args", {})
        if name == "[memory]" and not args.get("Device Type"):  # of the CPU
            found.append((event["ts"], (args["Addr"], args["Bytes"])))
        elif name.startswith(_MARK):
            found.append((event["ts"], None))
    return [change for _, change in sorted(found, key=lambda each: each[0])]


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


def _divided(
    changes: Iterable[tuple[int, int] | None],
) -> list[tuple[int, int, Counter[int] | None]]:
    """Return for each interval its growth, its peak, and the bytes that it freed.

    Freed bytes are counted by the interval that allocated them; older memory is left out.

    Example:
        >>> _divided([(1, 8), (9, -64), (1, -8), (2, 8), None, (1, 16), (2, -8)])
        [(8, 8, Counter()), (8, 16, Counter({0: 8}))]
    """
    alive: dict[int, tuple[int, int]] = {}
    found: list[tuple[int, int, Counter[int] | None]] = []
    now = top = 0
    freed: Counter[int] = Counter()
    for change in (*changes, None):
        if change is None:
            found.append((now, top, freed))
            now, top, freed = 0, 0, Counter()
            continue
        address, grown = change
        size, made = alive.pop(address, (0, -1))
        now -= size
        if 0 <= made < len(found):
            freed[made] += size
        if grown > 0:
            alive[address] = grown, len(found)
            now += grown
            top = max(top, now)
    return found
