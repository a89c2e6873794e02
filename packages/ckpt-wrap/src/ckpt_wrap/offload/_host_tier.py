"""Host memory as the place tensors of a device go to, by copies beside the device's other work.

A storage's stream is the one that was current when it was saved. Autograd runs backward there, so
it is where the storage was made ready, and where it will be read.

Rule 1. Every wait names the stream that waits and the event it waits for. What is current when a
        copy is started or let go of, in whichever thread, decides nothing.
Rule 2. A device has two streams for copies, one out and one in. A copy out starts when the
        storage's stream has come to where it was saved. A copy in starts when that stream has
        come to where the fetch was asked for: it has waited for the copy out by then (Rule 3), and
        the memory the copy is given may have been freed by work it has still to do.
Rule 3. The memory a copy reads or writes on the device belongs to the storage's stream, and is let
        go of once that stream has waited for the copy, or the host has seen it done. The stream's
        order protects it then; the allocator is told nothing, and has nothing to hold back.
Rule 4. Two tensors are used on a stream that their memory does not belong to: a source made on
        another stream than it was saved on, and a fetched tensor read on another than it was saved
        on. The allocator is told of these; for its owner that does nothing.
Rule 5. Host buffers are torch's pinned memory, which notes the streams that copy and hands a buffer
        out again when the host has seen their work done. So a buffer needs no owner and no pool,
        and may go from one device to another.
Rule 6. While a graph is captured, nobody asks whether a copy has ended: what is captured has not
        begun, and asking for anything else ends the capture. A captured copy is waited for by the
        storage's stream, and after the capture by nobody, for the graph has its own order. Of an
        earlier one the allocator is told: it cannot be waited for there.
Rule 7. A copy is used by whoever holds its storage's lock, and by the finalizer, which comes when
        nobody can hold it any more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch

from ckpt_wrap._errors import OffloadError


class Copy(Protocol):
    """A copy that was started between host and device."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is on the device, until it is let go of."""
        ...

    def done(self) -> bool:
        """Whether it has ended, asked without waiting."""
        ...

    def wait(self) -> None:
        """Have the current stream's later work start after it; the host does not wait."""
        ...

    def release(self) -> None:
        """Let go of what is on the device, see Rule 3; may be called again."""
        ...


class Link(Protocol):
    """Starts copies between a device and the host, beside the device's other work."""

    @property
    def idle(self) -> bool:
        """Whether there is no device to move from."""
        ...

    def takes(self, device: torch.device) -> bool:
        """Whether the tensors of this device are to be moved."""
        ...

    def copy_out(self, source: torch.Tensor) -> Copy:
        """Start copying a flat tensor to the host."""
        ...

    def copy_in(self, out: Any) -> Copy:
        """Start copying what `copy_out` took to a new tensor on the device."""
        ...


class HostStored:
    """The bytes of one storage in a host buffer."""

    is_immediate = False

    def __init__(self, link: Link) -> None:
        self._link = link
        self._out: Copy | None = None
        self._back: Copy | None = None

    def take(self, source: torch.Tensor) -> None:
        """Start copying the bytes of a flat tensor."""
        self._out = self._link.copy_out(source)

    def copied(self) -> bool:
        """Whether the source is no longer read."""
        assert self._out is not None
        return self._out.done()

    def release_source(self) -> None:
        """Let go of the source; its stream's later work starts when it is no longer read."""
        assert self._out is not None
        self._out.release()

    def fetch(self) -> torch.Tensor:
        """Start bringing the bytes back; call `wait_fetched` before using them."""
        self._back = self._link.copy_in(self._out)
        assert self._back.tensor is not None
        return self._back.tensor

    def wait_fetched(self) -> None:
        """Have the current stream's later work start when the bytes are back."""
        assert self._back is not None
        self._back.wait()

    def release_fetched(self) -> None:
        """Let go of what was brought back, read or not."""
        back, self._back = self._back, None
        if back is not None:
            back.release()

    def discard(self) -> None:
        """Let go of everything; may be called again."""
        out, self._out = self._out, None
        self.release_fetched()
        if out is not None:
            out.release()


class HostTier:
    """Host memory behind a link."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @property
    def idle(self) -> bool:
        """Whether there is no device whose tensors are to be moved."""
        return self.link.idle

    def takes(self, device: torch.device) -> bool:
        """Whether the tensors of this device are to be moved."""
        return self.link.takes(device)

    def place(self, source: torch.Tensor) -> HostStored:
        """A place for the bytes of a flat tensor; there is no buffer before it takes them."""
        del source
        return HostStored(self.link)


class StreamCopy:
    """A copy on a stream of its own.

    Args:
        tensor: what is on the device; its memory belongs to `stream`.
        host: what is on the host.
        stream: the storage's stream.
        ended: recorded on the stream that copies, after the copy.
        by: that stream.
    """

    __slots__ = ("_by", "_captured", "_has_waited", "ended", "host", "stream", "tensor")

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
        self.ended = ended
        self._by = by
        self._captured = is_capturing(stream)
        self._has_waited = False

    def done(self) -> bool:
        """Whether it has ended, asked without waiting; not while a graph is captured (Rule 6)."""
        if self._captured or captures_calls_on(self.stream.device) or is_capturing(self.stream):
            return False
        return self.ended.query()

    def wait(self) -> None:
        """Have the current stream's later work start after it."""
        current = torch.accelerator.current_stream(self.stream.device)
        current.wait_event(self.ended)
        if current == self.stream:
            self._has_waited = True
        elif self.tensor is not None:
            self.tensor.record_stream(current)  # Rule 4

    def release(self) -> None:
        """Let go of what is on the device, see Rule 3."""
        tensor, self.tensor = self.tensor, None
        if tensor is None or self._has_waited or self.done():
            return
        captures = is_capturing(self.stream)
        if self._captured is captures:
            self.stream.wait_event(self.ended)
        elif captures:
            tensor.record_stream(self._by)  # Rule 6


class StreamLink:
    """A link over two streams of its own per device, one out and one in, and pinned memory."""

    def __init__(self) -> None:
        self.idle = not torch.accelerator.is_available()
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}

    def takes(self, device: torch.device) -> bool:
        """Whether it is an accelerator; tensors of the CPU are on the host already."""
        return device.type not in ("cpu", "meta")

    def copy_out(self, source: torch.Tensor) -> StreamCopy:
        """Start copying a flat tensor to the host on the stream for it, see Rule 2."""
        stream = torch.accelerator.current_stream(source.device)
        out, _ = self._of(source.device)
        _refuse_old_torch(stream)
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        source.record_stream(stream)  # Rule 4
        out.wait_stream(stream)
        with _On(out):
            host.copy_(source, non_blocking=True)
        return StreamCopy(source, host, stream, out.record_event(), out)

    def copy_in(self, out: StreamCopy) -> StreamCopy:
        """Start copying to memory of the storage's stream on the stream for it, see Rule 2."""
        device = out.stream.device
        _, into = self._of(device)
        with _On(out.stream):
            flat = torch.empty(out.host.numel(), dtype=torch.uint8, device=device)
        into.wait_stream(out.stream)
        with _On(into):
            flat.copy_(out.host, non_blocking=True)
        return StreamCopy(flat, out.host, out.stream, into.record_event(), into)

    def _of(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        streams = self._streams.get(device)
        if streams is None:
            made = torch.Stream(device), torch.Stream(device)
            streams = self._streams.setdefault(device, made)
        return streams


def is_capturing(stream: torch.Stream) -> bool:
    """Whether what this stream is given is captured for a graph instead of run."""
    ask = _asks_if_capturing(stream.device.type)
    if ask is None:
        return False
    with _On(stream):  # torch answers for the current one
        return ask()


@functools.cache
def _asks_if_capturing(kind: str) -> Callable[[], bool] | None:
    return getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)


def captures_calls_on(device: torch.device) -> bool:
    """Whether what is called now on this device is captured for a graph."""
    if device.type in ("cpu", "meta"):
        return False
    return is_capturing(torch.accelerator.current_stream(device))


def _refuse_old_torch(stream: torch.Stream) -> None:
    if not _KEEPS_PINNED_MEMORY and is_capturing(stream):
        raise OffloadError(
            "ckpt_wrap.offload_: a graph is being captured, but pinned memory is a graph's own "
            f"only from torch 2.13 on, and this is {torch.__version__}: a replay would write to "
            "memory that others have by then. Update torch, or capture without offload_."
        )


_KEEPS_PINNED_MEMORY = torch.__version__ >= "2.13"  # a TorchVersion, which compares as one


class _On:
    """Makes a stream current. A stream as a context keeps what was before in itself, so that two
    threads could not enter the same one.
    """

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.accelerator.current_device_index()
        self._before = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.accelerator.set_stream(self._before)
        torch.accelerator.set_device_index(self._device)
