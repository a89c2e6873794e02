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


class Counters:
    """The counts of one module.

    Threads and finalizers count too, so no line reads a count, calls something, and writes it.

    Args:
        away_of_all: bytes by number of everything with the same options that is away.
    """

    def __init__(self, away_of_all: dict[int, int]) -> None:
        self._away_of_all = away_of_all
        self._copies_out = self._bytes_out = self._copies_in = self._bytes_in = 0
        self._away: dict[int, int] = {}  # bytes by the number that a storage left under
        self._peak = 0
        self.shared = self.kept = self._late = 0

    def out(self, number: int, nbytes: int) -> None:
        """A storage left, under a number of its own."""
        self._away[number] = self._away_of_all[number] = nbytes
        self._copies_out += 1
        self._bytes_out += nbytes
        away = sum(self._away.values())
        if away > self._peak:
            self._peak = away

    def back(self, nbytes: int, late: bool) -> None:
        """A storage was brought back; `late` if it was read when it was asked for."""
        self._copies_in += 1
        self._bytes_in += nbytes
        self._late += late

    def gone(self, number: int) -> None:
        """The storage of this number was released, if it had left."""
        self._away_of_all.pop(number, None)
        self._away.pop(number, None)

    def snapshot(self) -> OffloadStats:
        """The counts as they are."""
        return OffloadStats(
            self._copies_out,
            self._bytes_out,
            self._copies_in,
            self._bytes_in,
            self.shared,
            self.kept,
            sum(self._away.values()),
            self._peak,
            self._late,
        )
