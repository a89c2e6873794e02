"""A checksum of bytes in a file, computed while they are read to where they go.

Note [Checksum]
    zlib's CRC-32 is slower than the page cache. Each block of at most 1 MiB is therefore taken as
    rows of 2053 64-bit words, the columns are added up modulo 2**64, and the CRC goes over these
    sums and over what is left of the block, from one block to the next. A change of any one word
    changes its column. 2053 is prime, so that pages and disk sectors that change places inside a
    block do not keep their columns. It finds damage, not forgery.

A block is summed up when it has just been read, and is in the processor's caches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch

_BLOCK_BYTES = 1 << 20
_WORD_BYTES = 8
_COLUMNS = 2053
_ROW_BYTES = _WORD_BYTES * _COLUMNS


@dataclass(frozen=True)
class Goal:
    """Where some of the bytes go.

    Args:
        start: the first of them.
        address: of `memory`.
        memory: as many bytes, writable.
    """

    start: int
    address: int
    memory: memoryview

    @property
    def stop(self) -> int:
        """The first byte after them."""
        return self.start + len(self.memory)

    def direct(self, start: int, stop: int) -> memoryview | None:
        """Memory for these bytes, where all of them go here and words would lie at words."""
        if start < self.start or stop > self.stop:
            return None
        if (self.address + start - self.start) % _WORD_BYTES:
            return None
        return self.memory[start - self.start : stop - self.start]

    def take(self, block: memoryview, start: int) -> None:
        """Copy what goes here of a block that begins at `start`."""
        first, last = max(start, self.start), min(start + len(block), self.stop)
        if first < last:
            self.memory[first - self.start : last - self.start] = block[
                first - start : last - start
            ]


class Checksums:
    """Computes checksums of parts of files; keeps one block in memory."""

    def __init__(self) -> None:
        self._block = memoryview(bytearray(_BLOCK_BYTES))
        self._sum_bytes = bytearray(_ROW_BYTES)
        self._sums = torch.frombuffer(self._sum_bytes, dtype=torch.int64)

    def of(
        self,
        file: BinaryIO,
        offset: int,
        length: int,
        goals_of: Callable[[memoryview], Sequence[Goal]] = lambda _: (),
    ) -> int:
        """The checksum of `length` bytes at `offset`; see Note [Checksum]. O(length).

        Args:
            file: of bytes.
            offset: in the file.
            length: of what is read.
            goals_of: is given the first block, and says where which bytes go, by their position
                after `offset`; the others are only read.

        Raises:
            EOFError: the file ends before.
        """
        file.seek(offset)
        crc, goals = 0, list[Goal]()
        for start in range(0, length, _BLOCK_BYTES):
            stop = min(start + _BLOCK_BYTES, length)
            own = self._block[: stop - start]
            block = next(filter(None, (goal.direct(start, stop) for goal in goals)), own)
            found = _fill(block, file)
            if found != len(block):
                raise EOFError(f"the file ends {length - start - found} bytes early")
            if not start:
                goals = list(goals_of(block))
            if block is own:
                for goal in goals:
                    goal.take(block, start)
            crc = self._add(block, crc)
        return crc

    def _add(self, block: memoryview, crc: int) -> int:
        rows = len(block) // _ROW_BYTES
        if rows:
            words = torch.frombuffer(block, dtype=torch.int64, count=rows * _COLUMNS)
            torch.sum(words.view(rows, _COLUMNS), dim=0, out=self._sums)
            crc = zlib.crc32(self._sum_bytes, crc)
        return zlib.crc32(block[rows * _ROW_BYTES :], crc)


def _fill(block: memoryview, file: BinaryIO) -> int:
    """Read a block; how many bytes there were. A file without a buffer may give fewer at a time."""
    found = 0
    while found < len(block):
        read: int = file.readinto(block[found:])  # type: ignore[attr-defined]  # binary files do
        if not read:
            break
        found += read
    return found
