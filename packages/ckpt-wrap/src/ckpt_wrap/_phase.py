"""Whether this thread runs a checkpointed module, and for the first time or again."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Protocol

import torch
from torch import nn


class Asked(Protocol):
    """What has to know when a forward asks which run it is."""

    def asked(self, module: nn.Module) -> None:
        """A forward of `module` has asked."""
        ...


class _Phase(threading.local):
    recomputing = 0
    in_region = 0
    runs: tuple[Asked, ...] = ()  # those that are running, the innermost first


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
    if _phase.runs:
        module = _asking()
        if module is not None:
            for run in _phase.runs:
                run.asked(module)
    return _phase.recomputing > 0


def _asking() -> nn.Module | None:
    """The module whose method, or a function called by it, asks."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return module
        frame = frame.f_back
    return None


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
        run: is told when the forward asks which run it is.
    """

    __slots__ = ("_outer", "_run")

    def __init__(self, run: Asked) -> None:
        self._run = run
        self._outer: tuple[Asked, ...] = ()

    def __enter__(self) -> None:
        self._outer = _phase.runs
        _phase.runs = (self._run, *self._outer)
        self._count(1)

    def __exit__(self, *error: object) -> None:
        self._count(-1)
        _phase.runs = self._outer

    def _count(self, by: int) -> None:
        _phase.in_region += by


class SecondRun(FirstRun):
    """Context of its recomputation."""

    __slots__ = ()

    def _count(self, by: int) -> None:
        _phase.recomputing += by
