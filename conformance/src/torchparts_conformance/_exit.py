"""Edge: the exit codes of the suite, and how what is wrong is told."""

from __future__ import annotations

import sys
from collections.abc import Iterable

CONFORMANT = 0
NOT_CONFORMANT = 1
NO_DEVICE = 3
BAD_INPUT = 4
SUITE_BROKEN = 5


def tell(problems: Iterable[str], code: int) -> int:
    """Print problems to standard error, and give a code if there are any."""
    lines = list(problems)
    for line in lines:
        print(line, file=sys.stderr)
    return code if lines else CONFORMANT
