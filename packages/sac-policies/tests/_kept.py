"""Bytes that a forward keeps for backward."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def kept_bytes(forward: Callable[[], torch.Tensor]) -> int:
    """Bytes that the third forward leaves allocated, with its output, by the profiler's records."""
    for _ in range(2):
        forward().sum().backward()
    gc.collect()
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as found:
        out = forward()
    # Sums of the profiler's events count a record once for each event running at the time.
    events = found.profiler.kineto_results.events()
    size = sum(event.nbytes() for event in events if event.name() == "[memory]")
    del out
    return size
