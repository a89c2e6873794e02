"""Run an action when an object is collected, even if Ctrl-C lands while the action runs.

A finalizer in Python can be interrupted before its first line, and its exception is lost. So the
interpreter itself appends the weak reference to a queue, without running Python code, and the entry
stays there until its action has run. An action that was interrupted runs with the next one.
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
    """Run `action` when `owner` is collected; call it before the effect that `action` undoes.

    Args:
        owner: not referenced by `action`.
        action: may run a second time after an interrupt, or in two threads at a time.
    """
    # Of two callbacks the later one is called first, so the reference is queued before `do_due`.
    looks = weakref.ref(owner, do_due)
    ref = weakref.ref(owner, _due.append)
    _actions[ref] = action, looks


def do_due(_: object = None) -> None:
    """Run the queued actions."""
    while _due:
        try:
            ref = _due[0]
        except IndexError:  # another thread was faster
            return
        action, _looks = _actions.get(ref, (None, None))
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
