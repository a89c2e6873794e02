"""The bytes of one storage on their way elsewhere and back.

| state | `source` | `stored` | reading it |
|---|---|---|---|
| kept | yes | no | gives the source |
| leaving | yes | yes | gives the source |
| away | no | yes | fetches the bytes |
"""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import Protocol

import torch

from ckpt_wrap._errors import OffloadError, about
from ckpt_wrap._torch_compat import version_of
from ckpt_wrap.offload._offload_stats import Counters
from ckpt_wrap.offload._storage import flat_bytes
from ckpt_wrap.offload._when_gone import do_due, when_gone

_numbers = itertools.count()


class Stored(Protocol):
    """The bytes of one storage, somewhere else."""

    def take(self, source: torch.Tensor) -> None:
        """Start copying the bytes of a flat tensor."""
        ...

    def copied(self) -> bool:
        """Whether the source is no longer read."""
        ...

    def wait_copied(self) -> None:
        """Have the device's later work start when the source is no longer read."""
        ...

    def fetch(self) -> torch.Tensor:
        """Start bringing the bytes back; call `wait_fetched` before using them."""
        ...

    def wait_fetched(self) -> None:
        """Have the device's later work start when the bytes are back."""
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
        "_guard",
        "counters",
        "fetched",
        "nbytes",
        "process",
        "source",
        "stored",
        "version",
        "where",
    )

    def __init__(self, tensor: torch.Tensor, counters: Counters, where: str) -> None:
        self._guard: torch.Tensor | None = tensor.detach()
        self.source: torch.Tensor | None = flat_bytes(tensor)
        self.version = version_of(tensor)
        self.nbytes = self.source.numel()
        self.stored: Stored | None = None
        self.fetched: torch.Tensor | None = None
        self.counters = counters
        self.process = os.getpid()  # that has the right to remove what is stored
        self.where = where  # the module that saved it first, for messages

    def leave(self, tier: Tier) -> None:
        """Start copying the source elsewhere.

        Raises:
            OffloadError: it cannot be stored.
        """
        if self.source is not None and self.stored is None:
            do_due()
            number = next(_numbers)
            with about(f"a tensor saved by module {self.where}"):
                stored = tier.place(self.source)
                when_gone(self, partial(_forget, stored, self.counters, number))
                stored.take(self.source)
            self.stored = stored
            self.counters.out(number, self.nbytes)

    def drop_source(self) -> None:
        """Be away, unless the source was changed while it was copied: then keep it, to say so."""
        if self.changed():
            return
        self.source = self._guard = None

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether it is a place for this tensor of its storage too: unchanged, and made here.

        A forked child makes its own: what its parent stored goes when the parent is done with it.
        """
        return self.version == version_of(tensor) and self.process == os.getpid()

    def changed(self) -> bool:
        """Whether the source was changed in place since it was saved."""
        guard = self._guard
        return guard is not None and version_of(guard) != self.version

    def start_fetch(self) -> torch.Tensor | None:
        """Start bringing the bytes back, where they are away; what they come back to.

        Raises:
            OffloadError: what was stored is no longer there.
        """
        fetched = self.fetched
        if self.source is None and fetched is None and self.stored is not None:
            with about(f"a tensor saved by module {self.where}"):
                fetched = self.fetched = self.stored.fetch()
            self.counters.back(self.nbytes)
        return fetched

    def read(self) -> torch.Tensor:
        """The bytes, flat, ready to be used by the current stream.

        Raises:
            OffloadError: they were changed in place before they left, or cannot be brought back.
        """
        if self.changed():
            raise OffloadError(changed_message(self.where))
        source = self.source
        if source is not None:
            return source
        fetched = self.start_fetch()  # held here: another thread's backward may let go of it
        assert self.stored is not None
        assert fetched is not None
        self.stored.wait_fetched()
        return fetched


def _forget(stored: Stored, counters: Counters, number: int) -> None:
    stored.discard()
    counters.gone(number)


def changed_message(where: str) -> str:
    return (
        f"ckpt_wrap.offload_: a tensor saved by module {where} was changed in place after it was "
        "saved, but backward needs it as it was. Change a clone of it, or change it after backward."
    )
