"""Runs a step and reads from the allocator how much memory it took at most."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_LOG_LEVEL = "KINETO_LOG_LEVEL"


def peak_growth(step: Callable[[], object], *, device: torch.device) -> int:
    """Return by how many bytes a step's allocations exceed what was allocated before it.

    The allocator is asked, so temporaries inside operators count. On CPU, what is released of the
    memory from before is left out: the step could not count on it.

    Args:
        step: what is run, once.
        device: where it allocates; CPU, or an accelerator with CUDA's memory statistics.

    Example:
        >>> peak_growth(lambda: torch.ones(100).add(1), device=torch.device("cpu")) >= 800
        True
    """
    if device.type == "cpu":
        return _highest(_changes(step))
    memory = getattr(torch, device.type)
    memory.synchronize(device)
    before = memory.memory_allocated(device)
    memory.reset_peak_memory_stats(device)
    step()
    memory.synchronize(device)
    return int(memory.max_memory_allocated(device) - before)


def storage_bytes(tensors: Iterable[torch.Tensor | None], *, device: torch.device) -> int:
    """Bytes of the tensors' storages on `device`, shared ones counted once.

    Example:
        >>> x = torch.ones(100)
        >>> storage_bytes([x, x[10:], None], device=x.device)
        400
    """
    found = (each.untyped_storage() for each in tensors if each is not None)
    here = {storage.data_ptr(): storage.nbytes() for storage in found if storage.device == device}
    return sum(here.values())


def _changes(step: Callable[[], object]) -> list[tuple[int, int]]:
    """Address and bytes of each allocation (positive) and release (negative) on the CPU."""
    cpu = [ProfilerActivity.CPU]
    with _quiet(), profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    # Device type 0 is the CPU, as is none.
    here = [event for event in memory if not event["args"].get("Device Type")]
    in_order = sorted(here, key=lambda event: event["ts"])
    return [(event["args"]["Addr"], event["args"]["Bytes"]) for event in in_order]


@contextmanager
def _quiet() -> Iterator[None]:
    """Have the profiler not tell of each start and stop, unless somebody wants it to.

    It reads the variable when it is first used in a process.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "6"  # above what it says of every step
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


def _highest(changes: Iterable[tuple[int, int]]) -> int:
    """Follow allocations; a release of what none of them gave is of older memory.

    Example:
        >>> _highest([(1, 8), (9, -64), (1, -8), (1, 16)])
        16
    """
    alive: dict[int, int] = {}
    now = top = 0
    for address, change in changes:
        now -= alive.pop(address, 0)
        if change > 0:
            alive[address] = change
            now += change
            top = max(top, now)
    return top
