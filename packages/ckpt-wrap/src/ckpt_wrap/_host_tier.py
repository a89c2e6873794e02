"""Offload device tensors to pinned host memory on side streams.

The home stream of a storage is the stream that was current when the storage was saved. Autograd
runs backward on that stream, so the storage is produced and read there.

- Each wait names a stream and an event. No code depends on the current stream.
- A device has one copy-out and one copy-in stream. A copy starts when the home stream reaches the
  point of the request. So a copy-in starts after the copy-out, and after the last use of its target
  memory.
- Device memory of a copy belongs to the home stream. It is freed once that stream waits for the
  copy, or the host has seen the copy end, so `record_stream` is not needed for it.
- A tensor used on another stream is recorded with `record_stream`: a source produced elsewhere, and
  a fetched tensor read elsewhere.
- Host buffers are torch's pinned memory, which is reused when the host has seen its copies end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from ckpt_wrap._offloaded_storage import Stored


class _HostStored(Stored):
    """The bytes of one storage in a host buffer."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        self._out: StreamCopy | None = None
        self._back: StreamCopy | None = None

    def take(self, source: torch.Tensor) -> None:
        self._out = self._tier.copy_out(source)

    def copied(self) -> bool:
        return self._out is not None and self._out.done()

    def release_source(self) -> None:
        if self._out is not None:
            self._out.release()

    def fetch(self) -> torch.Tensor:
        assert self._out is not None
        self._back = self._tier.copy_in(self._out)
        assert self._back.tensor is not None
        return self._back.tensor

    def wait_fetched(self) -> None:
        assert self._back is not None
        self._back.wait()


class StreamCopy:
    """A copy on a side stream.

    Args:
        tensor: the device side, whose memory belongs to `stream`.
        host: the host side.
        stream: the storage's home stream.
        ended: event after the copy, recorded on the copy stream.
        by: the copy stream.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        host: torch.Tensor,
        stream: torch.Stream,
        ended: torch.Event,
        by: torch.Stream,
    ) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.host = host
        self.stream = stream
        self._ended = ended
        self._by = by
        self._has_waited = False

    def done(self) -> bool:
        """Whether it has ended; False during a graph capture, which a query would end."""
        captured = captures_calls_on(self.stream.device) or is_capturing(self.stream)
        return not captured and self._ended.query()

    def wait(self) -> None:
        """Make the current stream wait for it."""
        current = torch.accelerator.current_stream(self.stream.device)
        current.wait_event(self._ended)
        if current == self.stream:
            self._has_waited = True
        elif self.tensor is not None:
            self.tensor.record_stream(current)

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Free the device side, in the order of its stream."""
        tensor, self.tensor = self.tensor, None
        if tensor is None or self._has_waited or self.done():
            return
        if is_capturing(self.stream):  # it cannot wait for an event from outside the graph
            tensor.record_stream(self._by)
        else:
            self.stream.wait_event(self._ended)


class HostTier:
    """Pinned host memory, and two streams for copies per device: one out and one in."""

    def __init__(self) -> None:
        self.idle = not torch.accelerator.is_available()
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}

    def takes(self, device: torch.device) -> bool:
        """Whether it is an accelerator; CPU tensors are on the host already."""
        return device.type not in ("cpu", "meta")

    def place(self) -> Stored:
        """Return a place for the bytes of a storage; its buffer is allocated later."""
        return _HostStored(self)

    def copy_out(self, source: torch.Tensor) -> StreamCopy:
        """Start copying a flat tensor to the host."""
        stream = torch.accelerator.current_stream(source.device)
        out, _ = self._of(source.device)
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        source.record_stream(stream)
        out.wait_stream(stream)
        with _on(out):
            host.copy_(source, non_blocking=True)
        return StreamCopy(source, host, stream, out.record_event(), out)

    def copy_in(self, out: StreamCopy) -> StreamCopy:
        """Start copying the host side of `out` to memory of the home stream."""
        device = out.stream.device
        _, into = self._of(device)
        with _on(out.stream):
            flat = torch.empty(out.host.numel(), dtype=torch.uint8, device=device)
        into.wait_stream(out.stream)
        with _on(into):
            flat.copy_(out.host, non_blocking=True)
        return StreamCopy(flat, out.host, out.stream, into.record_event(), into)

    def _of(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        streams = self._streams.get(device)
        if streams is None:
            made = torch.Stream(device), torch.Stream(device)
            streams = self._streams.setdefault(device, made)
        return streams


def captures_calls_on(device: torch.device) -> bool:
    """Whether calls on this device are being captured for a graph."""
    if device.type in ("cpu", "meta"):
        return False
    return is_capturing(torch.accelerator.current_stream(device))


def is_capturing(stream: torch.Stream) -> bool:
    """Whether work on this stream is being captured instead of run."""
    ask = _asks_if_capturing(stream.device.type)
    if ask is None:
        return False
    with _on(stream):  # torch answers for the current stream
        return ask()


@functools.cache
def _asks_if_capturing(kind: str) -> Callable[[], bool] | None:
    return getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)


@contextlib.contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """Make a stream current.

    `torch.Stream` as a context keeps the previous stream in itself, so two threads could not enter
    the same one.
    """
    index = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)
