"""How far a run is: a line for each case that ended, and what of them is shown.

The process of the cases writes a line for each; the one that started it decides which are shown.
"""

from __future__ import annotations

import re
import sys

from torchparts_conformance._console import shown
from torchparts_conformance.run._case_result import CaseResult

EVERY = 20
_LINE = re.compile(r"\[ *(\d{1,9})/(\d{1,9})\] \S+ \S+ (\w+)")


class Progress:
    """Counts the cases that have ended."""

    def __init__(self, *, is_told: bool) -> None:
        self._is_told = is_told
        self._done = 0

    def ended(self, entry: CaseResult, total: int) -> None:
        """Take note of a case, and tell of it where that was asked for."""
        self._done += 1
        if self._is_told:
            ids = ",".join(requirement.id for requirement in entry.requirements)
            line = f"[{self._done:>4}/{total}] {ids} {entry.device} {entry.outcome}\n"
            sys.stderr.write(line)
            sys.stderr.flush()


def show(line: str) -> bool:
    """Show a line of progress; says whether it was one.

    A terminal sees each on one and the same line, a file every twentieth, and both every failure.
    """
    if not (told := _LINE.match(line)):
        return False
    done, total, is_bad = int(told[1]), int(told[2]), told[3] in ("fail", "error")
    text = shown(line.rstrip())[:100]
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if is_bad or done == total else ""))
    elif is_bad or done % EVERY == 0 or done == total:
        sys.stderr.write(text + "\n")
    sys.stderr.flush()
    return True
