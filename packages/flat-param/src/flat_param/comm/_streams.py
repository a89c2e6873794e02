"""Streams of an accelerator: which one memory belongs to, side streams, and graph captures.

The allocator reuses freed memory on the stream that was current at its allocation. So other
streams' work on it must be over by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType

import torch
from torch import Tensor

from .._errors import StateError

_HERE = nullcontext()


def home_stream(device: torch.device) -> torch.Stream | None:
    """The stream that tensors allocated now belong to; None on CPU, which has none."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def record_use(home: torch.Stream | None, *tensors: Tensor) -> None:
    """Keep memory of the stream `home` from reuse until the current stream has used it."""
    if home is not None:
        here = torch.accelerator.current_stream(home.device)
        for tensor in tensors if here != home else ():
            tensor.record_stream(here)


def at_home(stream: torch.Stream | None) -> AbstractContextManager[None]:
    """Run a block on a stream, after the work queued on the current one and before later work."""
    around = None if stream is None else torch.accelerator.current_stream(stream.device)
    if stream is None or around is None or around == stream:
        return _HERE
    return _switched(stream, around)


@contextmanager
def _switched(stream: torch.Stream, around: torch.Stream) -> Iterator[None]:
    device = torch.accelerator.current_device_index()
    stream.wait_stream(around)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(around)
        torch.accelerator.set_device_index(device)
        around.wait_stream(stream)


class SideWork:
    """A block whose work runs on a side stream, so that it overlaps with computation.

    Tensors of other streams that it uses must stay as they are until the work has been waited for.

    Args:
        device: an accelerator.
        lane: "in" for gathers and copies to the device, "out" for copies to the host.
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


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of the device's type is being captured into a graph."""
    ask = _asks(device.type)
    return ask is not None and ask()


@functools.cache
def _asks(kind: str) -> Callable[[], bool] | None:
    if kind in ("cpu", "meta"):
        return None
    return getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)


def refuse_capture(name: str, device: torch.device) -> None:
    """Raise an error during capture of a unit whose gradients are copied to the host."""
    if is_capturing(device):
        raise StateError(
            f"flat_param.fully_shard: unit '{name}' has an offload_policy and a graph is being "
            "captured, but gradients cannot be moved to the host during a capture. Capture "
            "without offload_policy, or run this module outside of the capture."
        )
