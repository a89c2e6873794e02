"""The bytes of one storage on their way elsewhere and back.

One lock for each storage: several threads may run backward through what one forward saved, for
every device has a backward thread of its own. Each change of state and each read is one step. The
lock may be held while other storages' finalizers run; these touch no storage. It may be taken again
by its thread, so that an exception from outside, wherever it lands, leaves a thread able to go on.

| state | `source` | `stored` | reading it |
|---|---|---|---|
| kept | yes | no | gives the source |
| leaving | yes | yes | gives the source |
| away | no | yes | fetches the bytes |
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from functools import partial
from typing import Protocol

import torch

from ckpt_wrap._errors import OffloadError, about
from ckpt_wrap._torch_compat import counter_owner, version_of
from ckpt_wrap.offload._offload_stats import Counters
from ckpt_wrap.offload._storage import flat_bytes, forget_bytes
from ckpt_wrap.offload._when_gone import do_due, when_gone

_numbers = itertools.count()


class Stored(Protocol):
    """The bytes of one storage, somewhere else.

    Attributes:
        is_immediate: whether all bytes are there when `take` returns, whatever is done to the
            source then.
    """

    is_immediate: bool

    def take(self, source: torch.Tensor) -> None:
        """Start copying the bytes of a flat tensor."""
        ...

    def copied(self) -> bool:
        """Whether the source is no longer read."""
        ...

    def release_source(self) -> None:
        """Let go of the source; the device's later work starts when it is no longer read."""
        ...

    def fetch(self) -> torch.Tensor:
        """Start bringing the bytes back; call `wait_fetched` before using them."""
        ...

    def wait_fetched(self) -> None:
        """Have the device's later work start when the bytes are back."""
        ...

    def release_fetched(self) -> None:
        """Let go of what was brought back, if anything was; it may not have been waited for."""
        ...

    def discard(self) -> None:
        """Forget the bytes, if it took any; may be called again."""
        ...


class Tier(Protocol):
    """A place for tensors."""

    @property
    def idle(self) -> bool:
        """Whether there is no device whose tensors are to be moved."""
        ...

    def takes(self, device: torch.device) -> bool:
        """Whether the tensors of this device are to be moved."""
        ...

    def place(self, source: torch.Tensor) -> Stored:
        """Where the bytes of a flat tensor can go; nothing is there before it takes them."""
        ...


class OffloadedStorage:
    """The bytes of one storage; its states are in the table above."""

    __slots__ = (
        "__weakref__",
        "_fetched",
        "_guard",
        "_lock",
        "_owner",
        "capture",
        "counters",
        "device",
        "nbytes",
        "process",
        "source",
        "stored",
        "version",
        "where",
    )

    def __init__(self, tensor: torch.Tensor, counters: Counters, where: str) -> None:
        self._lock = threading.RLock()
        # Shares the tensor's version, also when its bytes are gone.
        self._guard: torch.Tensor | None = tensor.detach()
        self._owner = weakref.ref(counter_owner(tensor))
        self.source: torch.Tensor | None = flat_bytes(tensor)
        self.version = version_of(tensor)
        self.device = tensor.device
        self.nbytes = self.source.numel()
        self.stored: Stored | None = None
        self._fetched: torch.Tensor | None = None
        self.counters = counters
        self.capture: object = None  # in which it was made, see Rule 3 in _offload_scheduler.py
        self.process = os.getpid()  # that has the right to remove what is stored
        self.where = where  # the module that saved it first, for messages

    def leave(self, tier: Tier) -> bool:
        """Start copying the source elsewhere; whether it began to leave now.

        Raises:
            OffloadError: it cannot be stored.
        """
        with self._lock:
            if self.source is None or self.stored is not None:
                return False
            if self._guard is not None and version_of(self._guard) != self.version:
                return False  # changed in place meanwhile: reading it is an error
            do_due()
            number = next(_numbers)
            with about(f"a tensor saved by module {self.where}"):
                stored = tier.place(self.source)
                when_gone(self, partial(_forget, stored, self.counters, number))
                stored.take(self.source)
            self.stored = stored
            self.counters.out(number, self.nbytes)
            return True

    def copied(self) -> bool:
        """Whether nothing reads the source any more."""
        with self._lock:
            return self.source is None or (self.stored is not None and self.stored.copied())

    def drop_source(self) -> None:
        """Be away; the device's later work waits for the copy, if it has not ended."""
        with self._lock:
            if self.source is not None and self.stored is not None:
                self.source = None
                if self.stored.is_immediate:
                    self._guard = None
                elif self._guard is not None:
                    forget_bytes(self._guard)
                self.stored.release_source()

    def shares(self, tensor: torch.Tensor, capture: object = None) -> bool:
        """Whether this tensor of the same storage can use this copy, too.

        Its bytes must not have changed since the copy was made. The version says so only for
        tensors with the same version counter. A forked child makes a copy of its own, because
        the parent removes what it stored.
        """
        is_here = self.process == os.getpid() and self.capture is capture
        same_counter = self._owner() is counter_owner(tensor)
        return is_here and same_counter and self.version == version_of(tensor)

    def start_fetch(self, late: bool = False) -> None:
        """Start bringing the bytes back, where they are away; late if they are read now.

        Raises:
            OffloadError: what was stored is no longer there.
        """
        with self._lock:
            self._fetch(late)

    def drop_fetched(self) -> None:
        """Let go of what was brought back; reading it again brings it back again."""
        with self._lock:
            if self._fetched is not None and self.stored is not None:
                self._fetched = None
                self.stored.release_fetched()

    def read(self) -> torch.Tensor:
        """The bytes, flat, ready to be used by the current stream.

        Raises:
            OffloadError: they were changed in place since, or cannot be brought back.
        """
        with self._lock:
            if self._guard is not None and version_of(self._guard) != self.version:
                raise OffloadError(changed_message(self.where))
            if self.source is not None:
                return self.source
            fetched = self._fetch(late=True)
            assert fetched is not None
            assert self.stored is not None
            self.stored.wait_fetched()
            return fetched

    def _fetch(self, late: bool) -> torch.Tensor | None:  # hold the lock
        if self._fetched is None and self.source is None and self.stored is not None:
            with about(f"a tensor saved by module {self.where}"):
                self._fetched = self.stored.fetch()
            self.counters.back(self.nbytes, late)
        return self._fetched


def _forget(stored: Stored, counters: Counters, number: int) -> None:
    stored.discard()
    counters.gone(number)


def changed_message(where: str) -> str:
    return (
        f"ckpt_wrap.offload_: a tensor saved by module {where} was changed in place after it was "
        "saved, but backward needs it as it was. Change a clone of it, or change it after backward."
    )
