"""Tells when whoever called a backward has it returned, or raised.

Whom a call of backward tells lies under a key of the thread's, which torch copies to each thread
that works for the call, and gives back to none but it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_TOLD = "flat_param: told of a backward's end"


def tell_of_returns() -> bool:
    """Have `when_backward_returns` told; whether it is. A second call does nothing.

    Fallback: nobody is told, and a backward that was stopped is over when the engine drops its
    work, which a thread of a device may hold for a while after `backward()` has raised.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if isinstance(engine, _TellingBackward):
        return True
    if type(engine) is not _TellingBackward.__base__ or not hasattr(torch._C, "_stash_obj_in_tls"):
        return False  # there is none, or somebody has put another one there
    torch.autograd.Variable._execution_engine = _TellingBackward()
    return True


def when_backward_returns(callback: Callable[[], None]) -> None:
    """Call back when whoever has called the backward that runs now has it returned, or raised.

    That is one call, whatever thread this runs on and whatever backwards are around it or inside.
    """
    told = _told()
    if told is not None:
        told.append(callback)


def _told() -> list[Callable[[], None]] | None:
    """Whom the call of the backward that runs now tells; None where none runs."""
    known: Callable[[str], bool] | None = getattr(torch._C, "_is_key_in_tls", None)
    return torch._C._get_obj_in_tls(_TOLD) if known is not None and known(_TOLD) else None


def _tell(told: list[Callable[[], None]] | None) -> None:
    """Have these told by the call of backward that this thread begins, or goes on with."""
    if _takes_what_is_not_given():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(told))
    torch._C._stash_obj_in_tls(_TOLD, told)


@cache
def _takes_what_is_not_given() -> bool:
    """Whether torch drops a reference to what it was given that it has never taken, as 2.9 does."""
    probe = object()
    count = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_TOLD + ", a probe", probe)
    if sys.getrefcount(probe) > count:
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return True


_leaf_of: list[Callable[[Any], Any]] = []  # one at most


def replace_inputs(leaf_of: Callable[[Any], Any]) -> None:
    """Have `backward(inputs=...)` compute the gradient of what `leaf_of` gives for each input.

    Fallback: where `tell_of_returns` is False, an input that is in no graph gets no gradient.
    """
    _leaf_of[:] = [leaf_of]


class _NoBackward:
    """Stands for torch's engine where there is none."""


class _TellingBackward(getattr(torch._C, "_ImperativeEngine", _NoBackward)):  # type: ignore[misc]
    """Torch's engine, of which there is one, with an end that callers see.

    The engine's own callbacks are dropped, and not called, when a backward raises; the last thread
    that has worked at it does so, and may come to that long after the caller goes on.
    """

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward, and tell of its end before the caller goes on."""
        if _leaf_of and kwargs.get("accumulate_grad") and len(args) > 4 and args[4]:
            args = (*args[:4], tuple(map(_leaf_of[0], args[4])), *args[5:])
        told: list[Callable[[], None]] = []
        around = _told()
        try:
            _tell(told)
            return super().run_backward(*args, **kwargs)
        finally:
            _tell(around)
            while told:
                told.pop(0)()
