"""Counts the values that no node of the graph holds, and that are held for what reads them.

Rule 1. One is held as long as something is made again that reads it; storage counts once, for all
        of them and for what is kept besides. Each copy is a storage of its own.
Rule 2. What only one value's replay reads is free where that is kept. What several read is held for
        any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Storage = tuple[int, int]
"""The call that made it, and which of that call's storages it is."""


@dataclass(frozen=True, slots=True)
class TracedConstant:
    """A value that no node of the graph holds, and that something made again reads.

    Attributes:
        made_by: index of the call that made its storage; -1 for a copy.
        output: which of the storages that the call made, from 0; 0 for a copy.
        storage_bytes: bytes of its storage, or of the copy.
    """

    made_by: int
    output: int
    storage_bytes: int


class Readings:
    """What the constants of a forward are read for.

    Args:
        constants: of the forward.
        by_storage: by storage that may be kept or made again, the constants that are read then.
        always: those that are read whatever is kept.
        fixed: bytes of storages that are kept in any case.
    """

    def __init__(
        self,
        constants: tuple[TracedConstant, ...],
        by_storage: Mapping[Storage, frozenset[int]],
        always: frozenset[int],
        fixed: Mapping[Storage, int],
    ) -> None:
        self._constants, self._by_storage, self._always = constants, by_storage, always
        places = enumerate(constants)
        self._keys = [(c.made_by, c.output) if c.made_by >= 0 else (-1, n) for n, c in places]
        self._all = self._sizes(range(len(constants)))
        held = self._sizes(always)
        self._readers: dict[Storage, list[Storage]] = {}
        """Whom what is neither held nor kept in any case is held for."""
        for storage, read in by_storage.items():
            for key, size in self._sizes(read).items():
                if key not in held and fixed.get(key, 0) < size:
                    self._readers.setdefault(key, []).append(storage)

    def _sizes(self, read: Iterable[int]) -> dict[Storage, int]:
        return {self._keys[at]: self._constants[at].storage_bytes for at in read}

    def held_bytes(self, again: Iterable[Storage], kept: Mapping[Storage, int]) -> int:
        """Bytes of all that is held, over those of what is kept.

        Args:
            again: storages that are made again.
            kept: bytes of those that are kept.
        """
        read = self._always.union(*(self._by_storage[storage] for storage in again))
        sizes = self._sizes(read).items()
        return sum(size for key, size in sizes if kept.get(key, 0) < size)

    def freed(self, sizes: Mapping[Storage, int]) -> dict[Storage, int]:
        """By storage, bytes that are held for it alone, up to its own (Rule 2)."""
        found: dict[Storage, int] = {}
        for key, readers in self._readers.items():
            if len(readers) == 1:
                found[readers[0]] = found.get(readers[0], 0) + self._all[key]
        return {storage: min(size, sizes[storage]) for storage, size in found.items()}

    def most_bytes(self) -> int:
        """Bytes that are held for what may be kept, if none of it is."""
        return sum(self._all[key] for key in self._readers)
