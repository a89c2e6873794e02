"""Torch: the order in which entries leave and come back, over all calls of a model.

Rule 1. An entry leaves when it is saved or, with `keep_last`, when that many later calls have
        finished. It is away once the copy is made, or once more than `max_inflight_bytes` are
        leaving: the device then waits, never the host.
Rule 2. The first read of a call's entries starts fetching the entries of the call before it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from ckpt_wrap._errors import OffloadError
from ckpt_wrap.offload._disk_tier import DiskTier
from ckpt_wrap.offload._entry import Entry, Tier
from ckpt_wrap.offload._host_tier import HostTier, StreamLink
from ckpt_wrap.offload._offload_options import OffloadOptions


class CallEntries:
    """The entries made in one call, and the call before it."""

    def __init__(self, previous: weakref.ref[CallEntries] | None) -> None:
        self.previous = previous
        self._entries: list[weakref.ref[Entry]] = []

    def add(self, entry: Entry) -> None:
        """Note an entry, without keeping it."""
        self._entries.append(weakref.ref(entry))

    def alive(self) -> Iterator[Entry]:
        """The entries that are still needed."""
        return (entry for ref in self._entries if (entry := ref()) is not None)


class Mover:
    """What all calls with the same options share: the tier and the order things leave in."""

    def __init__(self, tier: Tier, options: OffloadOptions) -> None:
        self.tier = tier
        self.options = options
        self.entries: weakref.WeakValueDictionary[Any, Entry] = weakref.WeakValueDictionary()
        self.latest: weakref.ref[CallEntries] | None = None
        self._reading: weakref.ref[CallEntries] | None = None
        self._finished: list[weakref.ref[CallEntries]] = []
        self._leaving: deque[Entry] = deque()
        self._leaving_bytes = 0

    def send(self, entry: Entry) -> None:
        """Have an entry leave, see Rule 1."""
        entry.leave(self.tier)
        self._leaving.append(entry)
        self._leaving_bytes += entry.nbytes
        self.settle()

    def settle(self) -> None:
        """Let go of the sources that are copied, and of the oldest beyond the bound."""
        while self._leaving:
            entry = self._leaving[0]
            assert entry.stored is not None
            if not entry.stored.copied():
                if self._leaving_bytes <= self.options.max_inflight_bytes:
                    return
                entry.stored.wait_copied()
            self._leaving.popleft()
            self._leaving_bytes -= entry.nbytes
            entry.drop_source()

    def finish(self, call: CallEntries) -> None:
        """Let go of what is copied, and have what older calls kept leave, see Rule 1."""
        self.settle()
        if self.options.keep_last == 0:
            return
        self._finished.append(weakref.ref(call))
        waiting = [ref for ref in self._finished if any(True for _ in _alive(ref))]
        last = max(0, len(waiting) - self.options.keep_last)
        self._finished = waiting[last:]
        for ref in waiting[:last]:
            for entry in _alive(ref):
                if entry.stored is None:
                    self.send(entry)

    def read_from(self, call: CallEntries, entry: Entry) -> None:
        """Note that backward reads this entry of this call, see Rule 2."""
        self.settle()
        entry.start_fetch()
        before = self._reading() if self._reading is not None else None
        if before is call:
            return
        self._reading = weakref.ref(call)
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
