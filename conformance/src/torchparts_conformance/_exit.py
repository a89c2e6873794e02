"""Pure: the exit codes of the suite; pytest's own never leave it."""

from __future__ import annotations

CONFORMANT = 0
NOT_CONFORMANT = 1
NO_DEVICE = 3
BAD_INPUT = 4
SUITE_BROKEN = 5
