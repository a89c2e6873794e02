"""Reads from the allocator how much memory a step takes between marks."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile, record_function

from .._errors import BudgetError
from .._torch_compat import storage_bytes as bytes_under
from .._torch_compat import storage_key
from ..eager._moved import counters, measured
from ._times import Clock, Spent, no_collection

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
    """Memory between one mark and the next.

    Attributes:
        key: of the mark; None before the first.
        grown: bytes in use at its end, minus those at its start.
        most: peak bytes in use, minus those at its start; at least 0.
        freed: on CPU, bytes of earlier intervals that it freed, by number of the interval.
        moved: bytes that were offloaded.
    """

    key: Any
    grown: int
    most: int
    freed: Mapping[int, int] | None = None
    moved: Moved = _NOTHING


class Marks:
    """Divides the memory of a step at marks.

    Args:
        device: where the step allocates; CPU, or an accelerator with CUDA's memory statistics.

    Attributes:
        spent: time of each interval by key, including the profiler's; set after the step.
    """

    spent: Spent

    def __init__(self, device: torch.device) -> None:
        self._device, self._clock = device, Clock(device)
        self._keys: list[Any] = [None]
        self._read: list[tuple[int, int, Moved]] = []
        self._memory = None if device.type == "cpu" else getattr(torch, device.type)

    def mark(self, key: Any) -> None:
        """Begin an interval."""
        if self._memory is None:
            with record_function(f"{_MARK}{len(self._keys)}"):
                pass
        self._clock.mark(key)  # synchronizes with the device
        self._note()
        self._keys.append(key)

    def intervals(self, step: Callable[[], object]) -> list[Interval]:
        """Run a step; return the memory of each interval between marks.

        Temporaries inside operators count. On CPU, memory from before that the step frees is left
        out.
        """

        def begun() -> None:
            self._note()
            step()

        def noted() -> None:
            self.spent = self._clock.spent(begun)
            self._note()

        found: list[Any]
        if self._memory is None:
            found = _divided(_changes(noted))
        else:
            with measured():
                noted()
            found = list(map(_between, self._read, self._read[1:]))
        return [Interval(key, *each) for key, each in zip(self._keys, found, strict=False)]

    def _note(self) -> None:
        """On accelerators, record the bytes in use, the peak since the last mark, and copies."""
        memory, device = self._memory, self._device
        if memory is not None:
            moved = Moved(counters.bytes_out, counters.bytes_in, counters.bytes_unread)
            now, most = memory.memory_allocated(device), memory.max_memory_allocated(device)
            self._read.append((now, most, moved))
            memory.reset_peak_memory_stats(device)


def _between(
    start: tuple[int, int, Moved], end: tuple[int, int, Moved]
) -> tuple[int, int, None, Moved]:
    moved = Moved(*map(sub, end[2], start[2]))
    return end[0] - start[0], max(0, end[1] - start[0]), None, moved


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
) -> list[tuple[int, int, Counter[int]]]:
    """Return for each interval its growth, its peak, and the bytes that it freed.

    Freed bytes are counted by the interval that allocated them; older memory is left out.

    Example:
        >>> _divided([(1, 8), (9, -64), (1, -8), (2, 8), None, (1, 16), (2, -8)])
        [(8, 8, Counter()), (8, 16, Counter({0: 8}))]
    """
    alive: dict[int, tuple[int, int]] = {}
    found: list[tuple[int, int, Counter[int]]] = []
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
