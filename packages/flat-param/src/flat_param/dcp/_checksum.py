"""A checksum of bytes in a file, at nearly the speed at which they are read.

Note [Checksum]
    zlib's CRC-32 is slower than the page cache. Each block of at most 1 MiB is therefore taken as
    rows of 2053 64-bit words, the columns are added up modulo 2**64, and the CRC goes over these
    sums and over what is left of the block, from one block to the next. A change of any one word
    changes its column. 2053 is prime, so that pages and disk sectors that change places inside a
    block do not keep their columns. It finds damage, not forgery.
"""

from __future__ import annotations

import zlib
from typing import BinaryIO

import torch

_BLOCK_BYTES = 1 << 20
_COLUMNS = 2053
_ROW_BYTES = 8 * _COLUMNS


class Checksums:
    """Computes checksums of parts of files; keeps one block in memory."""

    def __init__(self) -> None:
        self._block = memoryview(bytearray(_BLOCK_BYTES))
        self._words = torch.frombuffer(self._block, dtype=torch.int64)
        self._sum_bytes = bytearray(_ROW_BYTES)
        self._sums = torch.frombuffer(self._sum_bytes, dtype=torch.int64)

    def of(self, file: BinaryIO, offset: int, length: int) -> int:
        """The checksum of `length` bytes at `offset`; see Note [Checksum]. O(length).

        Raises:
            EOFError: the file ends before.
        """
        file.seek(offset)
        crc = 0
        while length:
            wanted = self._block[: min(length, _BLOCK_BYTES)]
            found = file.readinto(wanted)  # type: ignore[attr-defined]  # binary files have it
            if found != len(wanted):
                raise EOFError(f"the file ends {length - found} bytes early")
            crc = self._add(wanted, crc)
            length -= found
        return crc

    def _add(self, block: memoryview, crc: int) -> int:
        rows = len(block) // _ROW_BYTES
        if rows:
            words = self._words[: rows * _COLUMNS].view(rows, _COLUMNS)
            torch.sum(words, dim=0, out=self._sums)
            crc = zlib.crc32(self._sum_bytes, crc)
        return zlib.crc32(block[rows * _ROW_BYTES :], crc)
