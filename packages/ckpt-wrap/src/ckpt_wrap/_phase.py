"""Whether this thread runs a checkpointed module, in forward or in recomputation."""

from __future__ import annotations

import threading
from typing import Protocol

import torch


class Asked(Protocol):
    """State of a forward that remembers whether the forward called `is_recomputing()`."""

    asked: bool


class _Phase(threading.local):
    recomputing = 0
    in_region = 0
    runs: tuple[Asked, ...] = ()  # of the forwards that are running


_phase = _Phase()


def is_recomputing() -> bool:
    """Whether the current thread is running a checkpointed module again, for its backward.

    Always False in compiled code, which is the same in both runs.

    Example:
        >>> is_recomputing()
        False
    """
    if torch.compiler.is_compiling():
        return False
    for run in _phase.runs:
        run.asked = True
    return _phase.recomputing > 0


def is_checkpointing() -> bool:
    """Whether the current thread is running a checkpointed module, for the first time or again.

    Tensors that autograd saves there are not kept for backward. Outside a checkpointed module, and
    in one that is called without gradients, this is False.

    Example:
        >>> is_checkpointing()
        False
    """
    return _phase.in_region > 0 or _phase.recomputing > 0


class FirstRun:
    """Context of a checkpointed forward.

    Args:
        run: its `asked` is set when the forward calls `is_recomputing()`.
    """

    __slots__ = ("_outer", "_run")

    def __init__(self, run: Asked) -> None:
        self._run = run
        self._outer: tuple[Asked, ...] = ()

    def __enter__(self) -> None:
        self._outer = _phase.runs
        _phase.runs = (self._run, *self._outer)
        _phase.in_region += 1

    def __exit__(self, *error: object) -> None:
        _phase.in_region -= 1
        _phase.runs = self._outer


class SecondRun:
    """Context of a recomputation."""

    __slots__ = ()

    def __enter__(self) -> None:
        _phase.recomputing += 1

    def __exit__(self, *error: object) -> None:
        _phase.recomputing -= 1
