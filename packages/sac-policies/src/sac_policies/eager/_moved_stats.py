"""Counts of the values that policies have offloaded in this process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Counts since the process began, over all devices; use differences.

    Args:
        copies_out: values copied to host memory.
        bytes_out: their bytes.
        copies_in: values copied back.
        bytes_in: their bytes.
        late: values read before their copy back was requested; backward stalls for them.
        bytes_away: bytes in host memory now.
    """

    copies_out: int = 0
    bytes_out: int = 0
    copies_in: int = 0
    bytes_in: int = 0
    late: int = 0
    bytes_away: int = 0


class Counters:
    """Running counts.

    Attributes:
        bytes_unread: the part of `bytes_in` that was never read.
    """

    def __init__(self) -> None:
        self.copies_out = self.bytes_out = self.copies_in = self.bytes_in = 0
        self.bytes_unread = 0
        self.late = 0
        # A dict instead of a sum, since finalizers change it in the middle of other calls.
        self._away: dict[int, int] = {}
        self._numbers = itertools.count()

    def out(self, nbytes: int) -> int:
        """Count a value that is copied out; return its number."""
        number = next(self._numbers)
        self._away[number] = nbytes
        self.copies_out += 1
        self.bytes_out += nbytes
        return number

    def gone(self, number: int) -> None:
        """Remove the value with this number."""
        self._away.pop(number, None)

    @property
    def bytes_away(self) -> int:
        """Bytes in host memory now."""
        return sum(list(self._away.values()))


counters = Counters()


def offload_stats() -> OffloadStats:
    """Return the counts of values offloaded by policies so far, in this process.

    Values passed to saved-tensor hooks around a region belong to the hooks, and are not counted.

    Example:
        >>> offload_stats().bytes_away
        0
    """
    return OffloadStats(**{name: getattr(counters, name) for name in OffloadStats.__slots__})
