"""Hooks that a recomputation registers go when it ends.

A function that registers a hook on a tensor or a module from outside of its region did so in the
forward. Its recomputation does it again, and the hook would run twice.

`RemovableHandle.__init__` is replaced for that, as long as a recomputation runs anywhere in the
process; in other threads nothing is noted then.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch.utils.hooks import RemovableHandle

from ..._torch_compat import is_entered
from .._engine_disabled import active

_lock = threading.RLock()  # an interrupt may end a region while its thread is in here
_recomputing: weakref.WeakSet[Any] = weakref.WeakSet()
_plain: Any = None


def watch_hooks(mode: Any) -> None:
    """Note from now on each handle in the recomputation of this thread that makes it."""
    global _plain
    with _lock:
        _recomputing.add(mode)
        init: Any = RemovableHandle.__init__
        if not hasattr(init, "notes"):
            _plain = init
            RemovableHandle.__init__ = _noting(init)  # type: ignore[method-assign]


def unwatch_hooks(mode: Any) -> None:
    """End it; with the last recomputation all is as before.

    One that an interrupt kept from ending does not count once it is gone.
    """
    with _lock:
        _recomputing.discard(mode)
        if not _recomputing and hasattr(RemovableHandle.__init__, "notes"):
            RemovableHandle.__init__ = _plain  # type: ignore[method-assign]


def _noting(init: Any) -> Any:
    def noting(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for mode in active.modes:
            # An interrupt may leave a mode among the active ones, but not among torch's.
            if mode.handles is not None and is_entered(mode):
                mode.handles.append(self)
                return

    noting.notes = True  # type: ignore[attr-defined]  # our mark
    return noting
