"""How far a run is: a line for each case that ended, with counts and the time that is left.

The process of the cases writes the lines; the one that started it decides which are shown.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterable

from torchparts_conformance._console import shown
from torchparts_conformance.run._case_result import CaseResult

EVERY = 20
_LEAST_FOR_AN_ESTIMATE = 5
_LINE = re.compile(r"\[ *(\d{1,9})/(\d{1,9})\] ")


class Progress:
    """Counts the cases that have ended."""

    def __init__(self, *, is_told: bool) -> None:
        self._is_told = is_told
        self._totals: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._runs = self._ran = self._wrong = 0
        self._began_s = time.monotonic()

    def begins(self, entries: Iterable[tuple[CaseResult, bool]]) -> None:
        """Take note of every case that was selected, and whether it is going to run."""
        for entry, runs in entries:
            self._totals[entry.requirements[0].area] += 1
            self._runs += runs
        self._began_s = time.monotonic()

    def ended(self, entry: CaseResult, *, ran: bool) -> None:
        """Take note of a case, and tell of it where that was asked for."""
        area = entry.requirements[0].area
        self._done[area] += 1
        self._ran += ran
        self._wrong += entry.outcome in ("fail", "error")
        if self._is_told:
            total = self._totals.total()
            line = f"[{self._done.total():>{len(str(total))}}/{total}] "
            line += f"{area} {self._done[area]}/{self._totals[area]}"
            line += f", {self._wrong} wrong" if self._wrong else ""
            sys.stderr.write(f"{line}{self._left()}\n")
            sys.stderr.flush()

    def _left(self) -> str:
        """Estimate from what has run; what is only noted as left out takes no time."""
        rest = self._runs - self._ran
        if self._ran < _LEAST_FOR_AN_ESTIMATE or rest <= 0:
            return ""
        left_s = (time.monotonic() - self._began_s) / self._ran * rest
        return f", about {left_s / 60:.0f} min left" if left_s > 90 else f", {left_s:.0f} s left"


def show(line: str) -> bool:
    """Show a line of progress; says whether it was one.

    A terminal sees each on one and the same line, a file every twentieth and the last.
    """
    if not (told := _LINE.match(line)):
        return False
    done, total = int(told[1]), int(told[2])
    text = shown(line.rstrip())[:100]
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if done == total else ""))
    elif done % EVERY == 0 or done == total:
        sys.stderr.write(text + "\n")
    sys.stderr.flush()
    return True
