"""Torch: the order in which entries leave and come back, over all calls of a model.

Rule 1. An entry leaves when it is saved or, with `keep_last`, when that many later calls have
        finished. It is away once the copy is made, or once more than `max_inflight_bytes` are
        leaving: the device then waits, never the host.
Rule 2. The first read of a call's entries starts fetching the entries of the call before it.
Rule 3. Each thread that runs forward has an order of its own, `max_inflight_bytes` included: what
        another thread does neither delays its entries nor holds them. The calls keep their order,
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
from ckpt_wrap.offload._offloaded_storage import Entry, Tier


class CallOrder:
    """The calls of one thread, see Rule 3, and what is leaving; several threads may read it.

    Attributes:
        latest: the call that began last.
        reading: the call that backward reads now.
        finished: calls that still keep their entries, see Rule 1.
    """

    def __init__(self) -> None:
        self.latest: weakref.ref[CallEntries] | None = None
        self.reading: weakref.ref[CallEntries] | None = None
        self.finished: list[weakref.ref[CallEntries]] = []
        self._leaving: deque[tuple[Entry, int]] = deque()  # and bytes that left before it
        self._sent_bytes = 0

    @property
    def leaving_bytes(self) -> int:
        """Bytes that are leaving."""
        first = next(iter(self._leaving), None)
        return 0 if first is None else self._sent_bytes - first[1]

    def leaves(self, entry: Entry) -> None:
        """Note that an entry has begun to leave."""
        before = self._sent_bytes
        self._sent_bytes += entry.nbytes
        self._leaving.append((entry, before))

    def settle(self, max_inflight_bytes: int) -> None:
        """Let go of the sources that are copied, and of the oldest beyond the bound."""
        while self._leaving:
            try:
                first = entry, before = self._leaving[0]
            except IndexError:  # another thread was faster
                return
            assert entry.stored is not None
            if not entry.stored.copied():
                if self._sent_bytes - before <= max_inflight_bytes:
                    return
                entry.stored.wait_copied()
            entry.drop_source()
            with contextlib.suppress(ValueError):
                self._leaving.remove(first)


class CallEntries:
    """The entries made in one call, and the call before it."""

    def __init__(self, order: CallOrder) -> None:
        self.order = order
        self.previous = order.latest
        self._entries: list[weakref.ref[Entry]] = []
        order.latest = weakref.ref(self)

    def add(self, entry: Entry) -> None:
        """Note an entry, without keeping it."""
        self._entries.append(weakref.ref(entry))

    def alive(self) -> Iterator[Entry]:
        """The entries that are still needed."""
        return (entry for ref in self._entries if (entry := ref()) is not None)


class Mover:
    """What all calls with the same options share: the tier, and what is there already."""

    def __init__(self, tier: Tier, options: OffloadOptions) -> None:
        self.tier = tier
        self.options = options
        self.entries: weakref.WeakValueDictionary[Any, Entry] = weakref.WeakValueDictionary()
        self._orders = threading.local()

    @property
    def order(self) -> CallOrder:
        """The order of this thread's calls, see Rule 3."""
        try:
            order: CallOrder = self._orders.order
        except AttributeError:
            order = self._orders.order = CallOrder()
        return order

    def send(self, entry: Entry, order: CallOrder) -> None:
        """Have an entry leave, see Rule 1."""
        entry.leave(self.tier)
        order.leaves(entry)
        order.settle(self.options.max_inflight_bytes)

    def finish(self, call: CallEntries) -> None:
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
            for entry in _alive(ref):
                if entry.stored is None:
                    self.send(entry, order)

    def read_from(self, call: CallEntries, entry: Entry) -> None:
        """Note that backward reads this entry of this call, see Rule 2."""
        order = call.order
        order.settle(self.options.max_inflight_bytes)
        entry.start_fetch()
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


def _alive(ref: weakref.ref[CallEntries] | None) -> Iterator[Entry]:
    call = ref() if ref is not None else None
    return iter(()) if call is None else call.alive()


@functools.cache
def mover_for(options: OffloadOptions) -> Mover:
    """The mover of these options, one per process.

    Raises:
        OffloadError: the folder cannot be made or written to.
    """
    folder = options.folder
    return Mover(HostTier(StreamLink()) if folder is None else DiskTier(folder), options)
