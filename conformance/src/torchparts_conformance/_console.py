"""The exit codes of the suite, and how anything is said on a terminal.

Rule 1: what is said may be a stranger's; of characters that steer a terminal nothing gets there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

CONFORMANT = 0
NOT_CONFORMANT = 1
NO_DEVICE = 3
BAD_INPUT = 4
SUITE_BROKEN = 5


def say(*lines: str, is_wrong: bool = False) -> None:
    """Print lines, to standard error where something is wrong."""
    print("\n".join(map(shown, lines)), file=sys.stderr if is_wrong else sys.stdout)


def shown(line: str) -> str:
    """Give a line as it can be printed: one line, and nothing but characters that are seen.

    What continuous integration would take for a command is no longer at the start of its line.
    """
    seen = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    is_command = seen.lstrip().startswith(("::", "##["))
    return f"\N{REPLACEMENT CHARACTER}{seen}" if is_command else seen


def fail(problems: Iterable[str], code: int) -> int:
    """Say what is wrong, a line each, and give a code if anything is."""
    lines = list(problems)
    for line in lines:
        say(line, is_wrong=True)
    return code if lines else CONFORMANT
