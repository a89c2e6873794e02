"""A module call that somebody listens to - forward events, and what backward events need.

Whatever the module or a listener raises goes to the caller of the module, and leaves the thread's
state clean; which listeners may raise, `_subscription` says. Listeners told of the entry are told
of the exit, with output None if the call failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import is_grad_enabled, nn

from ._backward import Backward, CallBackward
from ._listeners import INTERNAL, NOTHING, PathListeners
from ._record import Call, Path
from ._thread_state import ThreadState
from ._torch_compat import NO_TASK, graph_task


def call_with_events(
    backward: Backward,
    state: ThreadState,
    listeners: PathListeners,
    seen: nn.Module | None,
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call the module, by `run`, between its events. The thread state is in the call already."""
    fresh = not state.leaves
    notified, call_backward, output = NOTHING, None, None
    try:
        if listeners.backward and is_grad_enabled():
            call_backward = backward.open(state, args, kwargs)
        for notify in listeners.pre_forward:
            notify(seen, args, kwargs)
        for hook in listeners.pre_hook:
            hook(seen, args)
        notified = listeners
        output = run(*args, **kwargs)
    finally:
        try:
            for notify in notified.post_forward:
                notify(seen, args, kwargs, output)
            for hook in notified.post_hook:
                hook(seen, args, output)
        finally:
            if fresh:
                state.leaves.clear()
    if backward.passes:
        prepare_backward(backward, state, call_backward, output)
    elif call_backward is not None:
        backward.close(call_backward, state, output)
    return output


def call_apart(
    backward: Backward,
    state: ThreadState,
    path: Path,
    outer: Call,
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Enter the call, `call_with_events`, and leave it, with everything that is rarely needed.

    The two halves of a `HookedCall`, around the call of `run`, without an object for it.
    """
    listeners = path.listeners or NOTHING
    if listeners is INTERNAL:
        return run(*args, **kwargs)
    attribution = backward.attribution
    before, before_task = state.call, state.task
    inner: Call | None = None
    try:
        inner = state.push(path, outer, graph_task())
        for notify in listeners.switched:
            notify(*attribution.locate())
        output = call_with_events(backward, state, listeners, path.module(), run, args, kwargs)
    finally:
        state.call, state.task = before, before_task
        if inner is not None:
            state.pop(inner, before, before_task, outer)
        for notify in listeners.switched:
            notify(*attribution.locate())
    mark_origin(backward, state, output)
    return output


def prepare_backward(
    backward: Backward, state: ThreadState, call_backward: CallBackward | None, output: Any
) -> None:
    """Attach to the graph what a call that has returned needs for its backward."""
    if backward.passes and graph_task() == NO_TASK:
        backward.forget_failed(state.thread)
    if call_backward is not None:
        backward.close(call_backward, state, output)


def mark_origin(backward: Backward, state: ThreadState, output: Any) -> None:
    """Note, for other threads, where a backward through the output of an outermost call began."""
    if backward.attribution.threaded and (state.call is state.base or graph_task() != state.task):
        backward.mark_origin(state, output)


class HookedCall:
    """A call entered and left by two separate hooks.

    Attributes:
        state: of the thread.
        module: what is called.
        frame: `id` of the frame that runs the two hooks.
        before: what ran until the call was entered, and `before_task` its backward.
        ending: whether its end is being told.
    """

    def __init__(
        self,
        backward: Backward,
        state: ThreadState,
        path: Path,
        outer: Call,
        module: nn.Module,
        args: tuple,
        *,
        frame: int,
    ) -> None:
        self.state, self.module, self.frame = state, module, frame
        self.before, self.before_task = state.call, state.task
        self.ending = False
        self._backward, self._path, self._outer, self._args = backward, path, outer, args
        self._inner: Call | None = None
        self._notified = NOTHING
        self._fresh = False
        self._call_backward: CallBackward | None = None

    def begin(self) -> None:
        """Enter the call and tell that it begins."""
        state, attribution, path = self.state, self._backward.attribution, self._path
        self._inner = state.push(path, self._outer, graph_task())
        listeners = path.listeners or NOTHING
        self._fresh = not state.leaves
        if listeners.backward and is_grad_enabled():
            self._call_backward = self._backward.open(state, self._args, {})
        for notify in listeners.switched:
            notify(*attribution.locate())
        for notify in listeners.pre_forward:
            notify(path.module(), self._args, {})
        for hook in listeners.pre_hook:
            hook(path.module(), self._args)
        self._notified = listeners

    def end(self, output: Any, *, ended: bool) -> None:
        """Tell that the call ends, and leave it; `ended` is False if the module did not return."""
        state, attribution, path = self.state, self._backward.attribution, self._path
        self.ending = True
        try:
            for notify in self._notified.post_forward:
                notify(path.module(), self._args, {}, output)
            for hook in self._notified.post_hook:
                hook(path.module(), self._args, output)
        finally:
            state.call, state.task = self.before, self.before_task
            if self._fresh:
                state.leaves.clear()
            if self._inner is not None:
                state.pop(self._inner, self.before, self.before_task, self._outer)
            for notify in (path.listeners or NOTHING).switched:
                notify(*attribution.locate())
        if ended and self._inner is not None:
            prepare_backward(self._backward, state, self._call_backward, output)
            mark_origin(self._backward, state, output)
