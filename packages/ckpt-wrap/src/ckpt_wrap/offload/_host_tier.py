"""Host memory as the place tensors of a device go to.

A `Link` moves bytes between a device and the host; everything else here and in `_offload` is
bookkeeping that runs the same over any link.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ckpt_wrap.offload._host_pool import HostPool


class Event(Protocol):
    """A point in a device's work."""

    def done(self) -> bool:
        """Whether the work up to here is finished, asked without waiting."""
        ...

    def wait(self) -> None:
        """Have work queued from now on start after this point; the host does not wait."""
        ...


class Link(Protocol):
    """Moves bytes between a device and the host, beside the device's other work."""

    @property
    def idle(self) -> bool:
        """Whether there is no device to move from."""
        ...

    def takes(self, device: torch.device) -> bool:
        """Whether the tensors of this device are to be moved."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A host buffer, one-dimensional uint8."""
        ...

    def copy_out(self, source: torch.Tensor, host: torch.Tensor, after: Event | None) -> Event:
        """Start copying to the host; the event is at its end."""
        ...

    def copy_in(
        self, host: torch.Tensor, device: torch.device, after: Event
    ) -> tuple[torch.Tensor, Event]:
        """Start copying to a new tensor on the device; the event is at its end."""
        ...


class HostStored:
    """The bytes of one storage in a host buffer."""

    def __init__(self, tier: HostTier, source: torch.Tensor) -> None:
        self._tier = tier
        self._device = source.device
        self._nbytes = source.numel()
        self._lease: tuple[torch.Tensor, Event] | None = None  # the buffer; after its last use
        self._out: Event

    def take(self, source: torch.Tensor) -> None:
        """Start copying the bytes of a flat tensor."""
        buffer, ready = self._tier.pool.acquire(self._nbytes)
        out = self._tier.link.copy_out(source, buffer[: self._nbytes], ready)
        self._out = out
        self._lease = buffer, out

    def copied(self) -> bool:
        """Whether the source is no longer read."""
        return self._out.done()

    def wait_copied(self) -> None:
        """Have the device's later work start when the source is no longer read."""
        self._out.wait()

    def fetch(self) -> torch.Tensor:
        """Start bringing the bytes back; call `wait_fetched` before using them."""
        assert self._lease is not None
        buffer, _ = self._lease
        flat, back = self._tier.link.copy_in(buffer[: self._nbytes], self._device, self._out)
        self._lease = buffer, back
        return flat

    def wait_fetched(self) -> None:
        """Have the device's later work start when the bytes are back."""
        assert self._lease is not None
        self._lease[1].wait()

    def discard(self) -> None:
        """Give the buffer back, once; one that a copy may still write to is not given back."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._tier.pool.release(*lease)


class HostTier:
    """Host memory behind a link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.pool: HostPool[Event] = HostPool(link.allocate)

    @property
    def idle(self) -> bool:
        """Whether there is no device whose tensors are to be moved."""
        return self.link.idle

    def takes(self, device: torch.device) -> bool:
        """Whether the tensors of this device are to be moved."""
        return self.link.takes(device)

    def place(self, source: torch.Tensor) -> HostStored:
        """A place for the bytes of a flat tensor; the buffer is acquired when it takes them."""
        return HostStored(self, source)


class _StreamEvent:
    """An accelerator's event."""

    __slots__ = ("_api", "_device", "_event")

    def __init__(self, api: Any, device: torch.device, stream: Any) -> None:
        self._api = api
        self._device = device
        self._event = api.Event()
        self._event.record(stream)

    def done(self) -> bool:
        """Whether the work up to here is finished, asked without waiting."""
        finished: bool = self._event.query()
        return finished

    def wait(self) -> None:
        """Have the current stream's later work start after this point."""
        self._api.current_stream(self._device).wait_event(self._event)


class StreamLink:
    """A link over two streams of its own per device, one out and one in, and pinned memory."""

    def __init__(self) -> None:
        self.idle = not torch.accelerator.is_available()
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    def takes(self, device: torch.device) -> bool:
        """Whether it is an accelerator; tensors of the CPU are on the host already."""
        return device.type not in ("cpu", "meta")

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A pinned buffer."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy_out(self, source: torch.Tensor, host: torch.Tensor, after: Event | None) -> Event:
        """Start copying to the host on the stream for it; the event is at its end."""
        api, (out, _) = torch.get_device_module(source.device), self._of(source.device)
        out.wait_stream(api.current_stream(source.device))
        with api.stream(out):
            if after is not None:
                after.wait()
            host.copy_(source, non_blocking=True)
            return _StreamEvent(api, source.device, out)

    def copy_in(
        self, host: torch.Tensor, device: torch.device, after: Event
    ) -> tuple[torch.Tensor, Event]:
        """Start copying to a new tensor on the stream for it; the event is at its end."""
        api, (_, into) = torch.get_device_module(device), self._of(device)
        flat = torch.empty(host.numel(), dtype=torch.uint8, device=device)
        # The memory may have been freed by work the current stream has still to do.
        into.wait_stream(api.current_stream(device))
        with api.stream(into):
            after.wait()
            flat.copy_(host, non_blocking=True)
            # Dropped unused, it must not be handed out again before the copy into it ends.
            flat.record_stream(into)
            return flat, _StreamEvent(api, device, into)

    def _of(self, device: torch.device) -> tuple[Any, Any]:
        if device not in self._streams:
            api = torch.get_device_module(device)
            self._streams.setdefault(device, (api.Stream(device), api.Stream(device)))
        return self._streams[device]
