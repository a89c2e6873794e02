"""Copies from page-locked host memory on a side stream, which overlap with computation.

The side stream waits for the work queued before the copy begins: only then is the target's memory
free. Later work overlaps with the copy until it waits for it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class HostCopy:
    """A copy into an accelerator's memory that has begun.

    Args:
        target: allocated on the current stream.
        source: in page-locked memory, of the same dtype; must not change until the copy ends.
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
        # The target's memory may be reused from now on, so the copy must have ended.
        if getattr(self, "_done", None) is not None:
            self.wait()


@functools.cache
def _copy_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
