"""Streams of an accelerator: which one memory belongs to, side streams, and graph captures.

The allocator reuses freed memory on the stream that was current at its allocation. So other
streams' work on it must be over by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType

import torch

HERE: AbstractContextManager[None] = nullcontext()
"""The home of memory on CPU, which has no streams."""


class Home:
    """A stream that memory belongs to.

    A block `with home` runs on it, after the work queued on the current stream and before later
    work there.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._around: list[tuple[torch.Stream, int]] = []

    def __enter__(self) -> None:
        around = torch.accelerator.current_stream(self._stream.device)
        self._around.append((around, torch.accelerator.current_device_index()))
        if around != self._stream:
            self._stream.wait_stream(around)
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        around, index = self._around.pop()
        if around != self._stream:
            torch.accelerator.set_stream(around)
            torch.accelerator.set_device_index(index)
            around.wait_stream(self._stream)


def home_of(device: torch.device) -> AbstractContextManager[None]:
    """The home of tensors that are allocated now."""
    return HERE if device.type == "cpu" else Home(torch.accelerator.current_stream(device))


class SideWork:
    """A block whose work runs on a side stream, so that it overlaps with computation.

    Tensors of other streams that it uses must stay as they are until the work has been waited for.

    Args:
        device: an accelerator.
        lane: "in" for gathers, "copy" for copies of shards to the device, "out" for those of
            gradients to the host, "word" for what ranks agree on.
        waits: whether the work begins after the work that is queued on the current stream.

    Attributes:
        stream: the side stream.
    """

    def __init__(self, device: torch.device, lane: str, *, waits: bool = True) -> None:
        self.stream = side_stream(device, lane)
        self._device, self._waits = device, waits
        self._done: torch.Event | None = None
        self._is_awaited = True

    def __enter__(self) -> SideWork:
        if self._waits:
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
            with suppress(RuntimeError):  # the work belongs to a capture that has ended
                self.wait()


@functools.cache
def side_stream(device: torch.device, lane: str) -> torch.Stream:
    """The side stream of a device; see `SideWork`."""
    return torch.Stream(device)


def wait_in(device: torch.device, lane: str) -> None:
    """Have a side stream wait for the work that is queued on the current stream."""
    side_stream(device, lane).wait_stream(torch.accelerator.current_stream(device))


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of the device's type is being captured into a graph."""
    return capture_query(device.type)()


@functools.cache
def capture_query(kind: str) -> Callable[[], bool]:
    """The function that says whether the current stream of a type of devices is being captured."""
    if kind in ("cpu", "meta"):
        return bool
    return getattr(torch.get_device_module(kind), "is_current_stream_capturing", bool)
