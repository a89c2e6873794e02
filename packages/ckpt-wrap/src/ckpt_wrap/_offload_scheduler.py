"""The order in which storages leave and come back, over all calls of a model.

- A storage leaves when it is saved or, with `keep_last`, when that many later calls have ended. It
  is away once the copy is made. The device waits for the copy, never the host: when the next call
  ends, or once more than `max_inflight_bytes` are leaving. So the bytes held do not grow with how
  far the host is ahead of the device.
- The first read of a call's storages starts fetching the storages of the call before it.
- Each thread that runs forward has an order of its own for each device. Calls keep their order,
  whichever threads run backward.
- The lock of an order guards its lists. A storage's lock is taken inside it, never the other way
  about; finalizers take neither.
- An order holds storages by weak references: they go when the graph releases them.
- A storage that would exceed `max_bytes_away` stays, also when there is room again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ckpt_wrap._disk_tier import DiskTier
from ckpt_wrap._errors import OffloadError
from ckpt_wrap._host_tier import HostTier
from ckpt_wrap._offloaded_storage import OffloadedStorage, Tier
from ckpt_wrap._options import OffloadOptions

MOST_INFLIGHT_BYTES = 1 << 30  # where no number is given


class _Leaving(NamedTuple):
    ref: weakref.ref[OffloadedStorage]
    bytes_before: int  # that left before it
    call: int


class CallOrder:
    """The calls of one thread on one device, and the storages that are leaving.

    Attributes:
        latest: the call that began last.
        reading: the call that backward reads now.
        finished: calls that still keep their storages, by `keep_last`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.latest: weakref.ref[CallStorages] | None = None
        self.reading: weakref.ref[CallStorages] | None = None
        self.finished: list[weakref.ref[CallStorages]] = []
        self.calls = 0
        self._leaving: deque[_Leaving] = deque()
        self._sent_bytes = 0

    def leaves(self, storage: OffloadedStorage) -> None:
        """Note that a storage has begun to leave."""
        with self.lock:
            self._leaving.append(_Leaving(weakref.ref(storage), self._sent_bytes, self.calls))
            self._sent_bytes += storage.nbytes

    def settle(self, max_inflight_bytes: int, before_call: int = 0) -> None:
        """Release copied sources, those of calls before one, and the oldest beyond a bound."""
        if not self._leaving:
            return
        with self.lock:
            while self._leaving:
                first = self._leaving[0]
                storage = first.ref()
                if storage is not None:
                    beyond = self._sent_bytes - first.bytes_before > max_inflight_bytes
                    if not beyond and first.call >= before_call and not storage.copied():
                        return
                    storage.drop_source()
                self._leaving.popleft()


class CallStorages:
    """The storages made in one call on one device, and those of the call before it."""

    def __init__(self, order: CallOrder) -> None:
        with order.lock:
            self.order = order
            self.previous = order.latest
            self._storages: list[weakref.ref[OffloadedStorage]] = []
            order.calls += 1
            self.number = order.calls
            order.latest = weakref.ref(self)

    def add(self, storage: OffloadedStorage) -> None:
        """Note a storage, without keeping it."""
        self._storages.append(weakref.ref(storage))

    def alive(self) -> Iterator[OffloadedStorage]:
        """The storages that are still needed."""
        return (storage for ref in self._storages if (storage := ref()) is not None)


class OffloadScheduler:
    """What all calls with the same options share: the tier, and the storages that left."""

    def __init__(self, tier: Tier, options: OffloadOptions) -> None:
        self.tier = tier
        self.options = options
        self.storages: weakref.WeakValueDictionary[Any, OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )
        limit = options.max_inflight_bytes
        self._limit = MOST_INFLIGHT_BYTES if limit is None else limit
        self.away: dict[int, int] = {}  # bytes by the number that a storage left under
        self._room = threading.RLock()  # taken before a storage's lock
        self._orders = threading.local()

    @property
    def orders(self) -> dict[torch.device, CallOrder]:
        """The orders of this thread's calls, by device."""
        orders: dict[torch.device, CallOrder] = self._orders.__dict__.setdefault("by_device", {})
        return orders

    def begin(self, device: torch.device) -> CallStorages:
        """A place for what a call of this thread saves on a device."""
        return CallStorages(self.orders.setdefault(device, CallOrder()))

    def send(self, storage: OffloadedStorage, order: CallOrder) -> None:
        """Start moving a storage, if there is room for it."""
        if self._has_left(storage):
            order.leaves(storage)
            order.settle(self._limit)

    def _has_left(self, storage: OffloadedStorage) -> bool:
        most = self.options.max_bytes_away
        if most is None:
            return storage.leave(self.tier)
        with self._room:
            if sum(self.away.values()) + storage.nbytes <= most:
                return storage.leave(self.tier)
        storage.counters.kept += 1
        return False

    def finish(self, calls: Iterator[CallStorages]) -> None:
        """Calls have ended: release copied sources, and move what older calls kept."""
        for order in self.orders.values():
            order.settle(self._limit)
        for call in calls:
            if self.options.keep_last:
                self._send_older(call)
            if self.options.max_inflight_bytes is None:
                call.order.settle(self._limit, before_call=call.number)

    def _send_older(self, call: CallStorages) -> None:
        order = call.order
        order.finished.append(weakref.ref(call))
        waiting = [ref for ref in order.finished if any(True for _ in _alive(ref))]
        last = max(0, len(waiting) - self.options.keep_last)
        order.finished = waiting[last:]
        for ref in waiting[:last]:
            for storage in _alive(ref):
                self.send(storage, order)

    def read_from(self, call: CallStorages, storage: OffloadedStorage) -> None:
        """Backward reads this storage of this call: fetch those of the call before it."""
        order = call.order
        order.settle(self._limit)
        storage.start_fetch(late=True)
        with order.lock:
            before = order.reading() if order.reading is not None else None
            if before is call:
                return
            order.reading = weakref.ref(call)
        for early in _alive(call.previous):
            with contextlib.suppress(OffloadError):  # raised again by the backward that reads it
                early.start_fetch()
        if before is not None:
            for late in before.alive():
                late.drop_fetched()


def _alive(ref: weakref.ref[CallStorages] | None) -> Iterator[OffloadedStorage]:
    call = ref() if ref is not None else None
    return iter(()) if call is None else call.alive()


@functools.cache
def scheduler_for(options: OffloadOptions) -> OffloadScheduler:
    """The scheduler of these options, one per process.

    Raises:
        OffloadError: the folder cannot be made or written to.
    """
    folder = options.folder
    return OffloadScheduler(HostTier() if folder is None else DiskTier(folder), options)
