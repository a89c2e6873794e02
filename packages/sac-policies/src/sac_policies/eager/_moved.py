"""Offload tensors to pinned host memory on side streams.

The home stream of a tensor is the stream that was current when the tensor was saved; backward runs
on it too.

Invariants:
- One copy-out and one copy-in stream per device. A copy starts when the home stream reaches the
  point where the copy was requested.
- Device memory that a copy reads or writes is freed only after the home stream has waited for the
  copy, or the host has seen it end. So `record_stream` is needed only where a tensor is produced or
  read on another stream.
- Device memory is freed once it is copied. If a thread's running copies exceed its largest tensor,
  or `lag_bytes`, the device waits for the oldest copy. At the end of a region the device waits for
  all copies, so a region's memory does not depend on later regions.
- When backward first reads a region, the copies of that region and of the region before it start
  back.
- If host memory cannot be allocated, the value stays on the device without an error.
- An in-place change of an offloaded tensor is an error, even before its copy has ended.
- During graph capture, events are not queried: that would end the capture.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch

from .._errors import EngineError, MutationError
from .._torch_compat import alias, backward_id, is_fake, storage_key
from .._torch_compat._dispatch import no_dispatch
from ._fingerprints import is_capturing

_KEEPS_PINNED_MEMORY = torch.__version__ >= "2.13"  # a TorchVersion, which compares as one
_streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}
_measured = [0]  # number of running measurements; backward threads read it, too


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Counts since the process began, over all devices; use differences.

    Args:
        copies_out: values copied to host memory.
        bytes_out: their bytes.
        copies_in: values copied back.
        bytes_in: their bytes.
        late: values read before their copy back was requested; backward stalls for them.
        bytes_away: bytes in host memory now.
    """

    copies_out: int = 0
    bytes_out: int = 0
    copies_in: int = 0
    bytes_in: int = 0
    late: int = 0
    bytes_away: int = 0


class Counters:
    """Running counts of `OffloadStats`."""

    copies_out = bytes_out = copies_in = bytes_in = late = 0


counters = Counters()


class NoHostMemoryError(Exception):
    """Host memory has no room for a copy."""


class MovedTensor:
    """One tensor in host memory until backward reads it.

    Attributes:
        host: the host copy; complete once the copy has ended.
        home: the device that it was copied from.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here = False
        self._back: torch.Tensor | None = None
        self._arrived: torch.Event | None = None
        self._captured = self._back_captured = False
        self._reader = -1  # the last backward that read it
        self._lock = threading.RLock()
        self.home = tensor.device
        with no_dispatch():
            self._stream = torch.accelerator.current_stream(self.home)
            self._captured = _is_capturing(self._stream)
            if self._captured and not _KEEPS_PINNED_MEMORY:
                raise EngineError(
                    "sac_policies.checkpoint: a policy offloads while a graph is being captured, "
                    "but pinned memory is a graph's own only from torch 2.13 on, and this is "
                    f"{torch.__version__}. Update torch, or capture a policy that keeps or "
                    "recomputes."
                )
            try:
                self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            except RuntimeError as error:  # torch raises no special class for this
                raise NoHostMemoryError from error
            counters.copies_out += 1
            counters.bytes_out += tensor.nbytes
            _away[id(self)] = self
            # Shares the tensor's version, also after its memory was freed.
            self._guard: torch.Tensor | None = alias(tensor)
            self._version = self._guard._version
            self._storage = storage_key(tensor)
            tensor.record_stream(self._stream)
            out, _ = _streams_of(self.home)
            self._made = self._stream.record_event()
            out.wait_event(self._made)
            self._here = True
            with _On(out):
                self.host.copy_(self._guard, non_blocking=True)
            self._out = out.record_event()
        leaving.note(self)

    def __del__(self) -> None:
        out, into = _streams_of(self.home)
        if self._here and self._guard is not None:
            self._wait_to_free(self._guard, self._out, out, self._captured)
        if self._back is not None and self._arrived is not None:
            self._wait_to_free(self._back, self._arrived, into, self._back_captured)

    def is_copied(self) -> bool:
        return not self._here or self._has_ended(self._out, self._captured)

    def let_go(self) -> None:
        with self._lock:
            if self._here and self._guard is not None:
                out, _ = _streams_of(self.home)
                self._wait_to_free(self._guard, self._out, out, self._captured)
                self._here = False
                with no_dispatch():
                    empty = torch.empty(0, dtype=self._guard.dtype, device=self.home)
                    self._guard.data = empty

    def start_back(self) -> None:
        """Start the copy back, if it was copied out and will be read."""
        with self._lock:
            is_read = self._reader >= 0 and self._reader == backward_id()
            if not (self._here or is_read) and self._back is None:
                self._bring_back()

    def _bring_back(self) -> None:  # hold the lock
        with no_dispatch():
            _, into = _streams_of(self.home)
            with _On(self._stream):
                back = torch.empty_like(self.host, device=self.home)
            into.wait_stream(self._stream)
            with _On(into):
                back.copy_(self.host, non_blocking=True)
            self._back, self._arrived = back, into.record_event()
            self._back_captured = _is_capturing(self._stream)
        counters.copies_in += 1
        counters.bytes_in += back.nbytes

    def is_changed(self) -> bool:
        return self._guard is not None and self._guard._version != self._version

    def read(self) -> torch.Tensor:
        """Return the tensor, ready for the current stream."""
        if self.is_changed():
            raise MutationError(
                "sac_policies.checkpoint: an offloaded tensor of shape "
                f"{list(self.host.shape)} was changed in place after the region, but backward "
                "reads it as it was. Change it after backward, or give the region a copy."
            )
        with self._lock, no_dispatch():
            current = torch.accelerator.current_stream(self.home)
            if self._here and self._guard is not None:
                value, ready = alias(self._guard), self._made
            else:
                if self._back is None:
                    counters.late += 1
                    self._bring_back()
                assert self._back is not None
                assert self._arrived is not None
                value, ready = self._back, self._arrived
                self._stream.wait_event(ready)
                self._back = self._arrived = None
                self._reader = backward_id()
            if current != self._stream:
                current.wait_event(ready)
                value.record_stream(current)
            return value

    def leave(self, storages: set[int | None]) -> None:
        """Stop offloading the tensor if its storage is among those about to be overwritten."""
        if self._guard is not None and self._storage in storages:
            torch.accelerator.current_stream(self.home).wait_event(self._out)
            self.let_go()
            self._guard = None

    def _has_ended(self, event: torch.Event, captured: bool) -> bool:
        if captured or _measured[0] or is_capturing(self.home) or _is_capturing(self._stream):
            return False
        return event.query()

    def _wait_to_free(
        self, tensor: torch.Tensor, event: torch.Event, by: torch.Stream, captured: bool
    ) -> None:
        if self._has_ended(event, captured):
            return
        captures = _is_capturing(self._stream)
        if captured is captures:
            self._stream.wait_event(event)
        elif captures:
            with no_dispatch():
                tensor.record_stream(by)


_away: weakref.WeakValueDictionary[int, MovedTensor] = weakref.WeakValueDictionary()


def offload_stats() -> OffloadStats:
    """Return the counts of values offloaded by policies so far, in this process.

    Values passed to saved-tensor hooks around a region belong to the hooks, and are not counted.

    Example:
        >>> offload_stats().bytes_away
        0
    """
    counts = {name: getattr(counters, name) for name in OffloadStats.__slots__[:-1]}
    away = [moved.host.nbytes for each in _away.valuerefs() if (moved := each()) is not None]
    return OffloadStats(**counts, bytes_away=sum(away))


def is_movable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be copied asynchronously: it is plain and on an accelerator."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type not in ("cpu", "meta")
        and tensor.layout is torch.strided
    )


class Leaving(threading.local):
    """Values of this thread with running copies out.

    Attributes:
        region: the last region that offloaded, held weakly.
        lag_bytes: most bytes of running copies of the running region.
    """

    def __init__(self) -> None:
        self.region: Callable[[], object] = lambda: None
        self.lag_bytes = 0
        self._values: deque[tuple[weakref.ref[MovedTensor], int]] = deque()
        self._bytes = self._largest = 0
        self._region_moves = False

    def note(self, moved: MovedTensor) -> None:
        """Add a value; free copied values, and the oldest one if too many copies are running."""
        nbytes = moved.host.nbytes
        self._region_moves = True
        self._values.append((weakref.ref(moved), nbytes))
        self._bytes += nbytes
        self._largest = max(self._largest, nbytes)
        self._settle(max(self._largest, self.lag_bytes))

    @contextmanager
    def lagging(self, nbytes: int) -> Iterator[None]:
        before, self.lag_bytes = self.lag_bytes, nbytes
        try:
            yield
        finally:
            self.lag_bytes = before

    def region_ended(self) -> bool:
        """Free all values; return whether the region offloaded anything."""
        moves, self._region_moves = self._region_moves, False
        self._settle(0)
        return moves

    def _settle(self, held_bytes: int) -> None:
        """Free copied values, and the oldest ones while running copies exceed the limit."""
        while self._values:
            ref, first_bytes = self._values[0]
            first = ref()
            is_due = self._bytes - first_bytes >= held_bytes
            if first is not None and not is_due and not first.is_copied():
                break
            self._values.popleft()
            self._bytes -= first_bytes
            if first is not None:
                first.let_go()


leaving = Leaving()


class Offloadable(Protocol):
    """A value, as `Offloads` reads and changes it."""

    held: torch.Tensor | None
    boxed: Callable[[], torch.Tensor] | None
    readers: int


class Offloads:
    """The values of one region that are to be offloaded, and its tensors that were."""

    def __init__(self) -> None:
        self._marked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._pending: list[weakref.ref[Offloadable]] = []
        self._moved: list[weakref.ref[MovedTensor]] = []
        self._asked = -1
        self._earlier: Callable[[], object] | None = None

    def mark(self, tensors: Iterable[torch.Tensor]) -> None:
        """Offload tensors, if they are held."""
        for each in tensors:
            self._marked[id(each)] = weakref.ref(each)

    def is_marked(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is to be offloaded if it is held."""
        marked = self._marked.get(id(tensor))
        return marked is not None and marked() is tensor

    def add(self, value: Offloadable) -> None:
        """Offload a value, once backward will read it."""
        self._pending.append(weakref.ref(value))

    def start(self) -> None:
        """Start the copies of pending values that backward reads."""
        waiting = []
        for each in self._pending:
            value = each()
            if value is None or value.held is None:
                continue
            if value.readers:
                self._move(value, value.held)
            else:
                waiting.append(each)
        self._pending = waiting

    def _move(self, value: Offloadable, tensor: torch.Tensor) -> None:
        if is_fake(tensor) or not is_movable(tensor):
            return
        try:
            moved = MovedTensor(tensor)
        except NoHostMemoryError:
            return
        value.held, value.boxed = None, moved.read
        self._moved.append(weakref.ref(moved))

    def leave(self, storages: set[int | None]) -> None:
        """Stop offloading tensors whose storage is about to be overwritten."""
        for moved in self._living():
            moved.leave(storages)

    def end(self) -> None:
        """End the region: its tensors come back before those of the region before it."""
        self._marked.clear()
        self._pending.clear()
        if self._moved and leaving.region_ended():
            self._earlier, leaving.region = leaving.region, weakref.ref(self)

    def ask_back(self, backward: int) -> None:
        """Start the copies back of this region and the previous one, once in a backward."""
        if not (self._moved or self._earlier) or 0 <= backward == self._asked:
            return
        self._asked = backward
        earlier = None if self._earlier is None else self._earlier()
        for each in (self, earlier):
            for moved in each._living() if isinstance(each, Offloads) else ():
                moved.start_back()

    def _living(self) -> list[MovedTensor]:
        return [moved for each in self._moved if (moved := each()) is not None]


@contextmanager
def measured() -> Iterator[None]:
    """Make the device wait for every copy that affects memory, for reproducible measurements."""
    _measured[0] += 1
    try:
        yield
    finally:
        _measured[0] -= 1


def _streams_of(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    streams = _streams.get(device)
    if streams is None:
        streams = _streams.setdefault(device, (torch.Stream(device), torch.Stream(device)))
    return streams


def _is_capturing(stream: torch.Stream) -> bool:
    with _On(stream):  # torch's query is about the current stream
        return is_capturing(stream.device)


class _On:
    """Makes a stream current. `torch.Stream` as a context stores the previous stream in itself, so
    two threads could not enter the same one.
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
