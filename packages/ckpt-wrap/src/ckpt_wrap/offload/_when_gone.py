"""What is done when an object is gone, though Ctrl-C may land while it is done.

An exception in a finalizer comes out nowhere, and a finalizer in Python can be interrupted before
its first line. So the interpreter itself notes, without running any Python, that something is
due; the note goes only when that is done. What an interrupt leaves due is done with the next.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_Ref = weakref.ref[Any]

_due: deque[_Ref] = deque()
_actions: dict[_Ref, tuple[Callable[[], object], _Ref]] = {}
atexit.register(_actions.clear)


def when_gone(owner: object, action: Callable[[], object]) -> None:
    """Have `action` run when `owner` is gone; call it before the effect that `action` undoes.

    Args:
        owner: not referred to by `action`.
        action: may be run a second time after an interrupt, or by two threads at a time.
    """
    # Of two callbacks the later one is called first: it is due before anything looks.
    looks = weakref.ref(owner, do_due)
    ref = weakref.ref(owner, _due.append)
    _actions[ref] = action, looks


def do_due(_: object = None) -> None:
    """Run what is due."""
    while _due:
        try:
            ref = _due[0]
        except IndexError:  # another thread was faster
            return
        _do(ref)


def _do(ref: _Ref) -> None:
    action, _ = _actions.get(ref, (None, None))
    try:
        if action is not None:
            action()
    except Exception:
        _done(ref)  # or it would be tried, and raise, for ever
        raise
    _done(ref)


def _done(ref: _Ref) -> None:
    _actions.pop(ref, None)
    with contextlib.suppress(ValueError):
        _due.remove(ref)
