"""The order in which storages leave and come back, over all calls of a model.

Rule 1. A storage leaves when it is saved or, with `keep_last`, when that many later calls have
        finished. It is away once the copy is made; the device waits for the copy, never the host,
        when the next call ends, or once more than `max_inflight_bytes` are leaving. So what is
        held does not grow with how far the host is ahead of the device. While a graph is captured
        it waits when the call itself ends: this may be the last one, and a capture that ends with
        a copy that nobody waited for is an error; a backward may be captured for another graph.
Rule 2. The first read of a call's storages starts fetching the storages of the call before it.
Rule 3. Each thread that runs forward has an order of its own for each device, `max_inflight_bytes`
        included: what another thread or device does neither delays its storages nor holds them.
        The calls keep their order, whichever threads run backward. What is captured for a graph has
        another: it is copied in replays alone, if there are any, and what is not captured is copied
        once. Neither may leave or come back in the other, nor be the other's storage.
Rule 4. An order's lock is held for its own lists and for letting go of sources; a storage's lock is
        taken inside it, never the other way about. Finalizers take neither.
Rule 5. An order holds no storage: what the graph gives up goes at once.
Rule 6. What would pass `max_bytes_away` stays, also when there is room again. Whether there is room
        is asked by one thread at a time; its lock is taken before a storage's.
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

from ckpt_wrap._errors import OffloadError
from ckpt_wrap.offload._disk_tier import DiskTier
from ckpt_wrap.offload._host_tier import HostTier, StreamLink, captures_calls_on
from ckpt_wrap.offload._offload_options import MOST_INFLIGHT_BYTES, OffloadOptions
from ckpt_wrap.offload._offloaded_storage import OffloadedStorage, Tier


class _Leaving(NamedTuple):
    ref: weakref.ref[OffloadedStorage]
    bytes_before: int  # that left before it
    call: int


class CallOrder:
    """The calls of one thread on one device, see Rule 3, and what is leaving.

    Attributes:
        captured: whether they are captured for graphs.
        latest: the call that began last.
        reading: the call that backward reads now.
        finished: calls that still keep their storages, see Rule 1.
    """

    def __init__(self, captured: bool = False) -> None:
        self.lock = threading.RLock()
        self.captured = captured
        self.latest: weakref.ref[CallStorages] | None = None
        self.reading: weakref.ref[CallStorages] | None = None
        self.finished: list[weakref.ref[CallStorages]] = []
        self.calls = 0
        self._leaving: deque[_Leaving] = deque()
        self._sent_bytes = 0

    @property
    def leaving_bytes(self) -> int:
        """Bytes of sources that are held for their copies."""
        with self.lock:
            storages = [entry.ref() for entry in self._leaving]
        return sum(s.nbytes for s in storages if s is not None)

    def leaves(self, storage: OffloadedStorage) -> None:
        """Note that a storage has begun to leave."""
        with self.lock:
            entry = _Leaving(weakref.ref(storage), self._sent_bytes, self.calls)
            self._sent_bytes += storage.nbytes
            self._leaving.append(entry)

    def settle(self, max_inflight_bytes: int, before_call: int = 0) -> None:
        """Let go of the sources that are copied, of those of calls before one, and of the oldest
        beyond a bound.
        """
        if not self._leaving:
            return
        with self.lock:
            while self._leaving:
                first = self._leaving[0]
                storage = first.ref()
                if storage is not None:
                    has_to_go = (
                        first.call < before_call
                        or self._sent_bytes - first.bytes_before > max_inflight_bytes
                    )
                    if not has_to_go and not storage.copied():
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
        storage.capture = self.capture
        self._storages.append(weakref.ref(storage))

    @property
    def capture(self) -> object:
        """Whose storages it may share: no other call's where it is captured, as graphs have no
        names, and the one before may have been given up.
        """
        return self if self.order.captured else None

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
        limit = options.max_inflight_bytes
        self._limit = MOST_INFLIGHT_BYTES if limit is None else limit
        self.away: dict[int, int] = {}  # bytes by the number that a storage left under
        self._room = threading.RLock()
        self._orders = threading.local()

    @property
    def orders(self) -> dict[tuple[torch.device, bool], CallOrder]:
        """The orders of this thread's calls by device, captured or not, see Rule 3."""
        try:
            orders: dict[tuple[torch.device, bool], CallOrder] = self._orders.by_device
        except AttributeError:
            orders = self._orders.by_device = {}
        return orders

    def send(self, storage: OffloadedStorage, order: CallOrder) -> None:
        """Have a storage leave, see Rule 1."""
        if self._has_left(storage):
            order.leaves(storage)
            order.settle(self._limit)

    def _has_left(self, storage: OffloadedStorage) -> bool:  # see Rule 6
        most = self.options.max_bytes_away
        if most is None:
            return storage.leave(self.tier)
        with self._room:
            if sum(self.away.values()) + storage.nbytes <= most:
                return storage.leave(self.tier)
        storage.counters.kept += 1
        return False

    def begin(self, device: torch.device) -> CallStorages:
        """A place for what a call of this thread saves on a device."""
        key = device, captures_calls_on(device)
        orders = self.orders
        if key not in orders:
            orders[key] = CallOrder(captured=key[1])
        if not key[1]:
            orders.pop((device, True), None)  # of a capture that is over
        return CallStorages(orders[key])

    def finish(self, calls: Iterator[CallStorages]) -> None:
        """Let go of what is copied, and have what older calls kept leave, see Rule 1."""
        for order in self.orders.values():
            order.settle(self._limit)
        for call in calls:
            if self.options.keep_last:
                self._send_older(call)
            if self.options.max_inflight_bytes is None:
                call.order.settle(self._limit, before_call=call.number)
        for (device, captured), order in self.orders.items():
            if captured and captures_calls_on(device):
                order.settle(self._limit, before_call=order.calls + 1)

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
        """Note that backward reads this storage of this call, see Rule 2."""
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
    return OffloadScheduler(HostTier(StreamLink()) if folder is None else DiskTier(folder), options)
