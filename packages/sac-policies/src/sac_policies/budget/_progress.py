"""One line on a terminal for each measured step."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class Progress:
    """Prints to the standard error, on the first rank and on a terminal only.

    Args:
        quiet: whether to print nothing.
    """

    def __init__(self, quiet: bool) -> None:
        is_first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
        self._is_shown = not quiet and is_first and sys.stderr.isatty()
        self._count = 0

    @contextmanager
    def step(self, what: str) -> Iterator[list[str]]:
        """Print a line after a step: its number, what it is, results that were added, seconds."""
        found: list[str] = []
        self._count += 1
        began = time.perf_counter()
        yield found
        if self._is_shown:
            took = f"{time.perf_counter() - began:.1f} s"
            line = ", ".join([f"fit_: step {self._count}, {what}", *found, took])
            print(line, file=sys.stderr, flush=True)
