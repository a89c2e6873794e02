"""A module call that somebody listens to - forward events, and what backward events need.

Whatever the module or a listener raises goes to the caller of the module, and leaves the thread's
state clean; which listeners may raise, `_subscription` says. Listeners told of the entry are told
of the exit, with output None if the call failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._backward import Backward
from ._listeners import Callback, PathListeners
from ._record import Path
from ._thread_state import ThreadState


def call_with_events(
    backward: Backward,
    state: ThreadState,
    path: Path,
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call the module, by `run`, between its events. The thread state is in the call already."""
    listeners: PathListeners = path.listeners
    backward.attribution.tell_switch()
    outermost, seen = not state.leaves, path.module()
    told: list[Callback] = []
    output = None
    try:
        call_backward = backward.open(state, listeners, args, kwargs)
        for entered, left in listeners.forward:
            if entered is not None:
                entered(seen, args, kwargs)
            if left is not None:
                told.append(left)
        output = run(*args, **kwargs)
    finally:
        try:
            for notify in told:
                notify(seen, args, kwargs, output)
        finally:
            if outermost:
                state.leaves.clear()
    backward.close(state, call_backward, output)
    return output
