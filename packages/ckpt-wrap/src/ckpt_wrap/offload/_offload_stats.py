"""Pure: exact counts of what offload moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Counts since the module was offloaded; bytes are those of the storages moved.

    Args:
        copies_out: storages that left.
        bytes_out: their bytes.
        copies_in: storages that were brought back; one that is read twice may count twice.
        bytes_in: their bytes.
        shared: saved tensors that needed no copy, their storage having left already.
        kept: saved tensors that stayed: parameters, buffers, small ones, those on the host.
        bytes_away: bytes elsewhere now.
        peak_bytes_away: the most there were at one time; for several modules together, the sum
            of what each had at most, which is no less than they had at one time.
    """

    copies_out: int = 0
    bytes_out: int = 0
    copies_in: int = 0
    bytes_in: int = 0
    shared: int = 0
    kept: int = 0
    bytes_away: int = 0
    peak_bytes_away: int = 0


class Counters:
    """Counts in the making."""

    def __init__(self) -> None:
        self._copies_out = self._bytes_out = self._copies_in = self._bytes_in = 0
        self._away = self._peak = 0
        self.shared = self.kept = 0

    def out(self, nbytes: int) -> None:
        """A storage left."""
        self._copies_out += 1
        self._bytes_out += nbytes
        self._away += nbytes
        self._peak = max(self._peak, self._away)

    def back(self, nbytes: int) -> None:
        """A storage was brought back."""
        self._copies_in += 1
        self._bytes_in += nbytes

    def gone(self, nbytes: int) -> None:
        """A storage elsewhere was given up."""
        self._away -= nbytes

    def snapshot(self) -> OffloadStats:
        """The counts as they are."""
        return OffloadStats(
            self._copies_out,
            self._bytes_out,
            self._copies_in,
            self._bytes_in,
            self.shared,
            self.kept,
            self._away,
            self._peak,
        )
