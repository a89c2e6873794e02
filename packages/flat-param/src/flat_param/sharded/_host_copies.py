"""Copies from page-locked host memory that run beside computation, on a stream of their own.

The stream waits for what was queued before the copy began: only then is the memory it fills free.
Work that is queued later runs at the same time as the copy, until it waits for it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class HostCopy:
    """A copy into an accelerator's memory that has begun.

    Args:
        target: allocated on the current stream.
        source: in page-locked memory, of the same dtype; nobody may write to it until the copy
            has ended.
    """

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._device = target.device
        stream = _copy_stream(target.device)
        stream.wait_stream(torch.accelerator.current_stream(target.device))
        with stream:
            target.copy_(source, non_blocking=True)
        self._done: torch.Event | None = stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait for the copy; a second call does nothing."""
        done, self._done = self._done, None
        if done is not None:
            torch.accelerator.current_stream(self._device).wait_event(done)

    def __del__(self) -> None:
        # The target's memory may be handed out again, and then the copy must have ended.
        if getattr(self, "_done", None) is not None:
            self.wait()


@functools.cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
