"""Errors of the suite, exit codes, and printing."""

from __future__ import annotations

import sys
from collections.abc import Iterable

CONFORMANT = 0
NOT_CONFORMANT = 1
NO_DEVICE = 3
BAD_INPUT = 4
SUITE_BROKEN = 5


class ConformanceError(Exception):
    """The suite cannot use its input. Printed on one line, with exit code 4."""


class AdapterError(ConformanceError, ValueError):
    """An implementation cannot be found or imported, or its adapter is not valid."""


class OptionError(ConformanceError, ValueError):
    """The value of an option is not valid."""


class RegistryError(ConformanceError, ValueError):
    """A requirement or a broken implementation has a wrong declaration."""


class ReportError(ConformanceError, ValueError):
    """A report or another file cannot be read."""


class RankError(ConformanceError, RuntimeError):
    """A worker process raised, crashed or did not answer in time."""


def say(*lines: str, is_wrong: bool = False) -> None:
    """Print lines; to standard error if `wrong`."""
    print("\n".join(map(printable, lines)), file=sys.stderr if is_wrong else sys.stdout, flush=True)


def printable(line: str) -> str:
    """Replace control characters, and escape text that CI services interpret as a command."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    is_command = shown.lstrip().startswith(("::", "##["))
    return f"\N{REPLACEMENT CHARACTER}{shown}" if is_command else shown


def fail(problems: Iterable[str], code: int) -> int:
    """Print problems, one per line. Return the exit code if there are any, else 0."""
    lines = list(problems)
    if lines:
        say(*lines, is_wrong=True)
    return code if lines else CONFORMANT


def one_line(error: BaseException, *, limit: int = 300) -> str:
    """Return class and message of an exception as one printable line."""
    try:
        message = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # an exception's __str__ may raise as well
        message = ""
    text = ": ".join(filter(None, (type(error).__name__, message)))
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."
