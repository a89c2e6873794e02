"""Replaces `RemovableHandle.__init__`; hooks of a recomputation go when it ends.

A function that registers a hook on a tensor or a module from outside of its region did so in the
forward. Its recomputation does it again, and the hook would run twice.
"""

from __future__ import annotations

from typing import Any

from torch.utils.hooks import RemovableHandle

from ..._torch_compat import is_entered
from .._engine_disabled import active


def watch_hooks() -> None:
    """Note from now on each handle in the recomputation that makes it; otherwise nothing changes.

    An interrupt may leave a mode among the active ones, but not among torch's.
    """
    init: Any = RemovableHandle.__init__
    if hasattr(init, "notes"):
        return

    def noting(self: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for mode in active.modes:
            if mode.handles is not None and is_entered(mode):
                mode.handles.append(self)
                return

    noting.notes = True  # type: ignore[attr-defined]  # our mark
    RemovableHandle.__init__ = noting  # type: ignore[method-assign]
