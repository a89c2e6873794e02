"""What this engine's modes are not to see: FSDP's work, and the engine's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from .._torch_compat import entered_modes, is_entered
from ..policies._views import Operator
from ._fsdp import RANGE_OPS


@runtime_checkable
class Mode(Protocol):
    """What is asked here of a mode."""

    op_table: Any

    def follow(self, op: Operator, args: tuple[Any, ...]) -> None:
        """See the start or the end of a profiler range."""


class _Active(threading.local):
    def __init__(self) -> None:
        self.modes: list[Any] = []

    def enter(self, mode: Any) -> None:
        """Add a mode, and drop those that an interrupt left here when it left them."""
        if self.modes:
            self.modes[:] = [each for each in self.modes if is_entered(each)]
        self.modes.append(mode)

    def leave(self, mode: Any) -> None:
        """Drop a mode and those inside it."""
        if mode in self.modes:
            del self.modes[self.modes.index(mode) :]


active = _Active()
"""Its `modes`: those of this engine that are entered now on this thread, innermost last."""


def seeing() -> list[Any]:
    """This engine's modes that see what this thread runs, outermost first.

    A device's backward thread runs under the modes of whoever called backward, on another thread.
    """
    entered = entered_modes()
    return list(active.modes) if entered is None else [m for m in entered if isinstance(m, Mode)]


class RangeHandler:
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


class EngineDisabled(dict[Operator, "RangeHandler | None"]):
    """The table of a mode that looks away: every operator is called and nothing else."""

    def __missing__(self, op: Operator) -> RangeHandler | None:
        return RangeHandler(op) if op in RANGE_OPS else None


@contextmanager
def own_work() -> Iterator[None]:
    """Run the engine's own operators: a region around this one is not to count or keep them.

    A mode calls operators with itself switched off, but the modes around it would see them.
    """
    # Not asked again at the end: unpacking may run a region again, whose modes come and go.
    looking = [(mode, mode.op_table) for mode in seeing()]
    for mode, _ in looking:
        mode.op_table = EngineDisabled()
    try:
        yield
    finally:
        for mode, table in looking:
            mode.op_table = table
