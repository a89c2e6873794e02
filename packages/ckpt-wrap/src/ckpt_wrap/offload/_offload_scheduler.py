"""The order in which storages leave and come back, over all calls of a model.

Rule 1. A storage leaves when it is saved or, with `keep_last`, when that many later calls have
        finished. It is away once the copy is made, or once more than `max_inflight_bytes` are
        leaving: the device then waits, never the host.
Rule 2. The first read of a call's storages starts fetching the storages of the call before it.
Rule 3. Each thread that runs forward has an order of its own, `max_inflight_bytes` included: what
        another thread does neither delays its storages nor holds them. The calls keep their order,
        whichever threads run backward.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from ckpt_wrap._errors import OffloadError
from ckpt_wrap.offload._disk_tier import DiskTier
from ckpt_wrap.offload._host_tier import HostTier, StreamLink
from ckpt_wrap.offload._offload_options import OffloadOptions
from ckpt_wrap.offload._offloaded_storage import OffloadedStorage, Tier


class CallOrder:
    """The calls of one thread, see Rule 3, and what is leaving; several threads may read it.

    Attributes:
        latest: the call that began last.
        reading: the call that backward reads now.
        finished: calls that still keep their storages, see Rule 1.
    """

    def __init__(self) -> None:
        self.latest: weakref.ref[CallStorages] | None = None
        self.reading: weakref.ref[CallStorages] | None = None
        self.finished: list[weakref.ref[CallStorages]] = []
        self._leaving: deque[tuple[OffloadedStorage, int]] = (
            deque()
        )  # and bytes that left before it
        self._sent_bytes = 0

    @property
    def leaving_bytes(self) -> int:
        """Bytes that are leaving."""
        first = next(iter(self._leaving), None)
        return 0 if first is None else self._sent_bytes - first[1]

    def leaves(self, storage: OffloadedStorage) -> None:
        """Note that a storage has begun to leave."""
        before = self._sent_bytes
        self._sent_bytes += storage.nbytes
        self._leaving.append((storage, before))

    def settle(self, max_inflight_bytes: int) -> None:
        """Let go of the sources that are copied, and of the oldest beyond the bound."""
        while self._leaving:
            try:
                first = storage, before = self._leaving[0]
            except IndexError:  # another thread was faster
                return
            assert storage.stored is not None
            if not storage.stored.copied():
                if self._sent_bytes - before <= max_inflight_bytes:
                    return
                storage.stored.wait_copied()
            storage.drop_source()
            with contextlib.suppress(ValueError):
                self._leaving.remove(first)


class CallStorages:
    """The storages made in one call, and the call before it."""

    def __init__(self, order: CallOrder) -> None:
        self.order = order
        self.previous = order.latest
        self._storages: list[weakref.ref[OffloadedStorage]] = []
        order.latest = weakref.ref(self)

    def add(self, storage: OffloadedStorage) -> None:
        """Note a storage, without keeping it."""
        self._storages.append(weakref.ref(storage))

    def alive(self) -> Iterator[OffloadedStorage]:
        """The storages that are still needed."""
        return (storage for ref in self._storages if (storage := ref()) is not None)


class OffloadScheduler:
    """What all calls with the same options share: the tier, and what is there already."""

    def __init__(self, tier: Tier, options: OffloadOptions) -> None:
        self.tier = tier
        self.options = options
        self.storages: weakref.WeakValueDictionary[Any, OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._orders = threading.local()

    @property
    def order(self) -> CallOrder:
        """The order of this thread's calls, see Rule 3."""
        try:
            order: CallOrder = self._orders.order
        except AttributeError:
            order = self._orders.order = CallOrder()
        return order

    def send(self, storage: OffloadedStorage, order: CallOrder) -> None:
        """Have a storage leave, see Rule 1."""
        storage.leave(self.tier)
        order.leaves(storage)
        order.settle(self.options.max_inflight_bytes)

    def finish(self, call: CallStorages) -> None:
        """Let go of what is copied, and have what older calls kept leave, see Rule 1."""
        order = call.order
        order.settle(self.options.max_inflight_bytes)
        if self.options.keep_last == 0:
            return
        order.finished.append(weakref.ref(call))
        waiting = [ref for ref in order.finished if any(True for _ in _alive(ref))]
        last = max(0, len(waiting) - self.options.keep_last)
        order.finished = waiting[last:]
        for ref in waiting[:last]:
            for storage in _alive(ref):
                if storage.stored is None:
                    self.send(storage, order)

    def read_from(self, call: CallStorages, storage: OffloadedStorage) -> None:
        """Note that backward reads this storage of this call, see Rule 2."""
        order = call.order
        order.settle(self.options.max_inflight_bytes)
        storage.start_fetch()
        before = order.reading() if order.reading is not None else None
        if before is call:
            return
        order.reading = weakref.ref(call)
        for early in _alive(call.previous):
            with contextlib.suppress(OffloadError):  # raised again by the backward that reads it
                early.start_fetch()
        if before is not None:
            for late in before.alive():
                late.fetched = None


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
    return OffloadScheduler(HostTier(StreamLink()) if folder is None else DiskTier(folder), options)
