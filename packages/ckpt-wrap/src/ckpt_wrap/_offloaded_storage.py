"""One storage that is offloaded and fetched, and counts of the copies.

| state | `source` | `stored` | reading it |
|---|---|---|---|
| kept | yes | no | gives the source |
| leaving | yes | yes | gives the source |
| away | no | yes | fetches the bytes |

Each storage has a lock, because several threads may run backward through one graph. Finalizers of
other copies may run while the lock is held; they take no lock. It is reentrant, so that a thread
can continue after an asynchronous exception.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from ckpt_wrap._errors import OffloadError, about
from ckpt_wrap._torch_compat import counter_owner, version_of


@dataclass(slots=True)
class OffloadStats:
    """Counts since the module was offloaded; bytes are those of the storages moved.

    Args:
        copies_out: storages that left.
        bytes_out: their bytes.
        copies_in: storages that were copied back.
        bytes_in: their bytes.
        shared: saved tensors that needed no copy because their storage had left already.
        kept: saved tensors that stayed: parameters, buffers, small ones, those on the host, and
            storages for which there was no room within `max_bytes_away`.
        bytes_away: bytes elsewhere now.
        peak_bytes_away: the most there were at one time; for several modules, the sum of their
            peaks, which need not coincide.
        late: copies back that were only requested when backward read them, and waited for them.
    """

    copies_out: int = 0
    bytes_out: int = 0
    copies_in: int = 0
    bytes_in: int = 0
    shared: int = 0
    kept: int = 0
    bytes_away: int = 0
    peak_bytes_away: int = 0
    late: int = 0


class BytesAway:
    """Bytes of storages that are elsewhere: those of the `Stored` that exist.

    The callback of a weak reference removes the entry of a `Stored` that was freed. It is no Python
    function, so no interrupt comes between: the total is right after an interrupt anywhere. They
    are added up again only if some were removed, since each copy reads the total.
    """

    def __init__(self) -> None:
        self._bytes: dict[weakref.ref[Stored], int] = {}
        self._sum = self._count = 0  # of the first `_count` entries

    @property
    def total(self) -> int:
        """Bytes of all storages."""
        if len(self._bytes) != self._count:
            count = len(self._bytes)
            self._sum = sum(self._bytes.values())
            self._count = count
        return self._sum

    def add(self, stored: Stored, nbytes: int) -> None:
        """Add the bytes of one storage."""
        total, count = self.total, self._count
        self._count = -1  # until the sum is right again
        self._bytes[weakref.ref(stored, self._bytes.pop)] = nbytes
        self._sum, self._count = total + nbytes, count + 1


class Counters:
    """The counts of one module.

    Other threads count too, so no line calls something between reading and writing a count.

    Args:
        away_of_all: those of all storages with the same options.
    """

    def __init__(self, away_of_all: BytesAway) -> None:
        self.counts = OffloadStats()
        self._away_of_all = away_of_all
        self._away = BytesAway()

    def out(self, stored: Stored, nbytes: int) -> None:
        """Count a storage that left."""
        self._away.add(stored, nbytes)
        self._away_of_all.add(stored, nbytes)
        self.counts.copies_out += 1
        self.counts.bytes_out += nbytes
        away = self._away.total
        if away > self.counts.peak_bytes_away:
            self.counts.peak_bytes_away = away

    def back(self, nbytes: int, late: bool) -> None:
        """Count a storage that was fetched; `late` if backward waited for it."""
        self.counts.copies_in += 1
        self.counts.bytes_in += nbytes
        self.counts.late += late

    def snapshot(self) -> OffloadStats:
        """The counts at present."""
        return replace(self.counts, bytes_away=self._away.total)


class Stored(ABC):
    """The bytes of one storage, elsewhere; freed with this object.

    The defaults are those of a place that has all bytes when `take` returns.
    """

    @abstractmethod
    def take(self, source: torch.Tensor) -> None:
        """Start copying the bytes of a flat tensor."""

    def copied(self) -> bool:
        """Whether the source is not read any more."""
        return True

    def release_source(self) -> None:  # noqa: B027  # nothing, by default
        """Release the source after the device's present work."""

    @abstractmethod
    def fetch(self) -> torch.Tensor:
        """Start bringing the bytes back; call `wait_fetched` before using them."""

    def wait_fetched(self) -> None:  # noqa: B027  # nothing, by default
        """Make the device's later work wait for the fetched bytes."""


class OffloadedStorage:
    """The bytes of one storage; its states are in the table above."""

    def __init__(self, tensor: torch.Tensor, counters: Counters, where: str) -> None:
        self._lock = threading.RLock()
        # Shares the tensor's version counter, also when its bytes are gone.
        self._guard = tensor.detach()
        self._owner = weakref.ref(counter_owner(tensor))
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.source: torch.Tensor | None = flat.set_(tensor.untyped_storage())
        self.version = version_of(tensor)
        self.device = tensor.device
        self.nbytes = self.source.numel()
        self.stored: Stored | None = None
        self._fetched: torch.Tensor | None = None
        self.counters = counters
        self.where = where  # the module that saved it first, for messages

    def leave(self, stored: Stored) -> bool:
        """Start copying the source to a place; return False if it stays.

        Raises:
            OffloadError: it cannot be stored.
        """
        with self._lock:
            if self.source is None or self.stored is not None or self._is_changed():
                return False
            with about(f"a tensor saved by module {self.where}"):
                stored.take(self.source)
            self.counters.out(stored, self.nbytes)
            self.stored = stored
            return True

    def copied(self) -> bool:
        """Whether the source is not read any more."""
        with self._lock:
            return self.source is None or (self.stored is not None and self.stored.copied())

    def drop_source(self) -> None:
        """Drop the source; the device's later work waits for the copy, if it has not ended."""
        with self._lock:
            if self.source is not None and self.stored is not None:
                self.source = None
                # The guard keeps only the version counter.
                self._guard.data = torch.empty(0, dtype=self._guard.dtype, device=self.device)
                self.stored.release_source()

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor of the same storage can use this copy, too.

        Its bytes must not have changed since the copy was made. The version tells that only for
        tensors with the same version counter.
        """
        return self._owner() is counter_owner(tensor) and self.version == version_of(tensor)

    def start_fetch(self, late: bool = False) -> None:
        """Start bringing the bytes back, if they are away; `late` if they are read now."""
        with self._lock:
            if self._fetched is None and self.source is None and self.stored is not None:
                self._fetched = self.stored.fetch()
                self.counters.back(self.nbytes, late)

    def read(self) -> torch.Tensor:
        """The bytes, flat, ready to be used by the current stream.

        Raises:
            OffloadError: they were changed in place since.
        """
        with self._lock:
            if self._is_changed():
                raise OffloadError(changed_message(self.where))
            if self.source is not None:
                return self.source
            self.start_fetch(late=True)
            assert self._fetched is not None
            assert self.stored is not None
            self.stored.wait_fetched()
            return self._fetched

    def _is_changed(self) -> bool:
        return version_of(self._guard) != self.version


def changed_message(where: str) -> str:
    return (
        f"ckpt_wrap.offload_: a tensor saved by module {where} was changed in place after it was "
        "saved, but backward needs it as it was. Change a clone of it, or change it after backward."
    )
