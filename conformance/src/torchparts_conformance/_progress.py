"""Edge: one line on standard error as cases end, so that a long run is seen to move."""

from __future__ import annotations

import sys

from torchparts_conformance._entry import Entry

EVERY = 20


class Progress:
    """Counts the cases that have ended; without a total nothing is printed."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._done = 0

    def ended(self, entry: Entry, total: int) -> None:
        """Take note of a case; a terminal sees each, a file every twentieth and every failure."""
        self._done += 1
        if not self._is_shown:
            return
        bad = entry.outcome in ("fail", "error")
        ids = ",".join(requirement.id for requirement in entry.requirements)
        line = f"[{self._done:>4}/{total}] {ids} {entry.device} {entry.outcome}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line:.100}" + ("\n" if bad else ""))
        elif bad or self._done % EVERY == 0 or self._done == total:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()
