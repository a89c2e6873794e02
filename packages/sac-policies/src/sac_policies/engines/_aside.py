"""Torch: what this engine's modes are not to see: FSDP's work, and the engine's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .._fsdp import RANGE_OPS
from .._views import Operator

if TYPE_CHECKING:
    from ._contexts import Mode


class _Active(threading.local):
    def __init__(self) -> None:
        self.modes: list[Mode] = []


active = _Active()
"""Its `modes`: those of this engine that are entered now on this thread, innermost last."""


class RangeVisit:
    """The start or the end of a profiler range: shown to the mode."""

    __slots__ = ("op",)

    def __init__(self, op: Operator) -> None:
        self.op = op

    def forward(self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and tell the mode."""
        out = self.op(*args, **kwargs)
        mode.follow(self.op, args)
        return out

    replay = forward


class Aside(dict[Operator, "RangeVisit | None"]):
    """The table of a mode that looks away: every operator is called and nothing else."""

    def __missing__(self, op: Operator) -> RangeVisit | None:
        return RangeVisit(op) if op in RANGE_OPS else None


@contextmanager
def own_work() -> Iterator[None]:
    """Run the engine's own operators: a region around this one is not to count or keep them.

    A mode calls operators with itself switched off, but the modes around it would see them.
    """
    tables = [mode.visits for mode in active.modes]
    for mode in active.modes:
        mode.visits = Aside()
    try:
        yield
    finally:
        for mode, table in zip(active.modes, tables, strict=True):
            mode.visits = table
