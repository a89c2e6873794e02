"""The order in which storages leave and come back, over all calls of a model.

- A storage starts to leave when it is saved. Its source is freed when the next call ends, or once
  more than `INFLIGHT_BYTES` are leaving; the device waits for the copy, never the host. So the
  bytes held do not grow with how far the host is ahead of the device.
- The first read of a call's storages starts fetching the storages of the call before it.
- Each thread that runs forward has an order. Calls belong to it, whichever threads run backward.
- The lock of an order guards its lists. A storage's lock is taken inside it, never the reverse.
  Finalizers take neither.
- An order holds storages by weak references, so they go when the graph releases them.
- A storage that would exceed `max_bytes_away` stays, even if there is room later.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpt_wrap._disk_tier import DiskTier
from ckpt_wrap._host_tier import HostTier
from ckpt_wrap._offloaded_storage import BytesAway, OffloadedStorage
from ckpt_wrap._options import OffloadOptions

INFLIGHT_BYTES = 1 << 30


class _Leaving(NamedTuple):
    ref: weakref.ref[OffloadedStorage]
    bytes_before: int  # total of the storages that left earlier
    call: int


class CallOrder:
    """The calls of one thread, and the storages that are leaving.

    Attributes:
        latest: the call that began last.
        reading: the call that backward reads now.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.latest: weakref.ref[CallStorages] | None = None
        self.reading: weakref.ref[CallStorages] | None = None
        self.calls = 0
        self._leaving: deque[_Leaving] = deque()
        self._sent_bytes = 0

    def leaves(self, storage: OffloadedStorage) -> None:
        """Record that a storage has begun to leave."""
        with self.lock:
            self._leaving.append(_Leaving(weakref.ref(storage), self._sent_bytes, self.calls))
            self._sent_bytes += storage.nbytes

    def settle(self, before_call: int = 0) -> None:
        """Free sources: copied ones, those of earlier calls, and the oldest beyond the bound."""
        if not self._leaving:
            return
        with self.lock:
            while self._leaving:
                first = self._leaving[0]
                storage = first.ref()
                if storage is not None:
                    beyond = self._sent_bytes - first.bytes_before > INFLIGHT_BYTES
                    if not beyond and first.call >= before_call and not storage.copied():
                        return
                    storage.drop_source()
                self._leaving.popleft()


class CallStorages:
    """The storages saved in one call, and a reference to the call before it."""

    def __init__(self, order: CallOrder) -> None:
        with order.lock:
            self.order = order
            self.previous = order.latest
            self._storages: list[weakref.ref[OffloadedStorage]] = []
            order.calls += 1
            self.number = order.calls
            order.latest = weakref.ref(self)

    def add(self, storage: OffloadedStorage) -> None:
        """Add a weak reference to a storage."""
        self._storages.append(weakref.ref(storage))

    def alive(self) -> Iterator[OffloadedStorage]:
        """The storages that are still needed."""
        return (storage for ref in self._storages if (storage := ref()) is not None)


class OffloadScheduler:
    """State shared by all calls with the same options: the tier, and the storages that left."""

    def __init__(self, tier: HostTier | DiskTier, options: OffloadOptions) -> None:
        self.tier = tier
        self.options = options
        self.storages: weakref.WeakValueDictionary[Any, OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )
        self.away = BytesAway()
        self._room = threading.RLock()  # taken before a storage's lock
        self._local = threading.local()

    @property
    def order(self) -> CallOrder:
        """The order of this thread's calls."""
        order: CallOrder = self._local.__dict__.setdefault("order", CallOrder())
        return order

    def send(self, storage: OffloadedStorage, order: CallOrder) -> None:
        """Start moving a storage, if there is room for it."""
        if self._has_left(storage):
            order.leaves(storage)
            order.settle()

    def _has_left(self, storage: OffloadedStorage) -> bool:
        most = self.options.max_bytes_away
        if most is None:
            return storage.leave(self.tier.place())
        with self._room:
            if self.away.total + storage.nbytes <= most:
                return storage.leave(self.tier.place())
        storage.counters.counts.kept += 1
        return False

    def read_from(self, call: CallStorages, storage: OffloadedStorage) -> None:
        """Backward reads a storage of a call: fetch the storages of the call before it."""
        order = call.order
        order.settle()
        storage.start_fetch(late=True)
        with order.lock:
            if order.reading is not None and order.reading() is call:
                return
            order.reading = weakref.ref(call)
        previous = call.previous() if call.previous is not None else None
        for early in previous.alive() if previous is not None else ():
            early.start_fetch()


@functools.cache
def scheduler_for(options: OffloadOptions) -> OffloadScheduler:
    """The scheduler of these options, one per process.

    Raises:
        OffloadError: the folder cannot be written to.
    """
    return OffloadScheduler(
        HostTier() if options.to == "cpu" else DiskTier(str(options.to)), options
    )
