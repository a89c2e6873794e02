"""Copies between a device and page-locked host memory, which overlap with computation.

They run on side streams, one for each direction. A side stream waits for the work queued before a
copy begins, so memory of the current stream may be used. Later work overlaps with the copy until it
waits for it.
"""

from __future__ import annotations

import functools
from types import TracebackType

import torch


class HostCopy:
    """A block whose work runs on a side stream of a device.

    What it uses must stay as it is until the block's work has been waited for.

    Args:
        device: an accelerator.
        direction: "in" or "out", seen from the device.

    Attributes:
        stream: the side stream.
    """

    def __init__(self, device: torch.device, direction: str) -> None:
        self.stream = _stream(device, direction)
        self._device = device
        self._done: torch.Event | None = None
        self._is_awaited = True

    def __enter__(self) -> HostCopy:
        self.stream.wait_stream(torch.accelerator.current_stream(self._device))
        self.stream.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done, self._is_awaited = self.stream.record_event(), False
        self.stream.__exit__(kind, error, trace)

    def wait(self) -> None:
        """Make the current stream wait for the work."""
        if self._done is not None:
            self._is_awaited = True
            torch.accelerator.current_stream(self._device).wait_event(self._done)

    def synchronize(self) -> None:
        """Make the host wait for the work."""
        if self._done is not None:
            self._is_awaited = True
            self._done.synchronize()

    def __del__(self) -> None:
        # Memory of the current stream may be reused from now on, so the work must have ended.
        if not self._is_awaited:
            self.wait()


@functools.cache
def _stream(device: torch.device, direction: str) -> torch.Stream:
    return torch.Stream(device)
