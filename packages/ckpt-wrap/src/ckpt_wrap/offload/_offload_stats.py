"""Exact counts of what offload moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Counts since the module was offloaded; bytes are those of the storages moved.

    Args:
        copies_out: storages that left.
        bytes_out: their bytes.
        copies_in: storages that were copied back; one that is read twice may count twice.
        bytes_in: their bytes.
        shared: saved tensors that needed no copy because their storage had left already.
        kept: saved tensors that stayed: parameters, buffers, small ones, those on the host, and
            storages for which there was no room within `max_bytes_away`.
        bytes_away: bytes elsewhere now.
        peak_bytes_away: the most there were at one time; for several modules together, the sum
            of what each had at most, which is no less than they had at one time.
        late: of the storages copied back, how many had not been requested before they were read:
            backward stalls for such a copy, however short it is.
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


class Counters:
    """Counts in the making.

    Threads and finalizers count too, so no line here reads a count, calls something, and writes
    the count.

    Args:
        away_of_all: bytes by number of everything with the same options that is away.
    """

    def __init__(self, away_of_all: dict[int, int]) -> None:
        self._away_of_all = away_of_all
        self._copies_out = self._bytes_out = self._copies_in = self._bytes_in = 0
        self._away: dict[int, int] = {}  # bytes by the number that a storage left under
        self._about_away = self._peak = 0  # an interrupt can leave the former too large
        self.shared = self.kept = self._late = 0

    def out(self, number: int, nbytes: int) -> None:
        """A storage left, under a number of its own."""
        self._away[number] = self._away_of_all[number] = nbytes
        self._copies_out += 1
        self._bytes_out += nbytes
        self._about_away += nbytes
        if self._about_away > self._peak:
            away = self._bytes_away()
            if away > self._peak:
                self._peak = away

    def back(self, nbytes: int, late: bool) -> None:
        """A storage was brought back, asked for when it was read or before."""
        self._copies_in += 1
        self._bytes_in += nbytes
        self._late += late

    def gone(self, number: int) -> None:
        """The storage of this number was given up, if it had left."""
        self._away_of_all.pop(number, None)
        nbytes = self._away.pop(number, 0)
        self._about_away -= nbytes

    def _bytes_away(self) -> int:
        return sum(self._away.values())

    def snapshot(self) -> OffloadStats:
        """The counts as they are."""
        return OffloadStats(
            self._copies_out,
            self._bytes_out,
            self._copies_in,
            self._bytes_in,
            self.shared,
            self.kept,
            self._bytes_away(),
            self._peak,
            self._late,
        )
