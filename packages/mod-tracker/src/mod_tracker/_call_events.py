"""A module call that somebody listens to - forward events, and what backward events need.

Whatever the module or a listener raises goes to the caller of the module, and leaves the thread's
state clean; which listeners may raise, `_subscription` says. Listeners told of the entry are told
of the exit, with output None if the call failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import is_grad_enabled, nn

from ._attribution import FORWARD, RECOMPUTE
from ._backward import Backward, CallBackward
from ._listeners import INTERNAL, NOTHING, Callback, PathListeners
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
    call_backward, output = None, None
    told: tuple[Callback, ...] = ()
    hooked: tuple[Callback, ...] = ()
    try:
        if is_grad_enabled():
            if listeners.backward:
                # That a module is left, the edges of its inputs tell: nobody may want to know.
                left = bool(listeners.post_backward)
                call_backward = backward.open(state, args if left else (), kwargs if left else {})
            elif listeners.switched:
                backward.watch(state, (*args, *kwargs.values()) if kwargs else args)
        entered = 0
        try:
            for notify in listeners.pre_forward:
                notify(seen, args, kwargs)
                entered += 1
        except BaseException:
            told = listeners.waiting(entered)
            raise
        # Before a hook, which may raise: who was told of the entry waits for the exit.
        told = listeners.post_forward
        for hook in listeners.pre_hook:
            hook(seen, args)
        hooked = listeners.post_hook
        output = run(*args, **kwargs)
    finally:
        try:
            for notify in told:
                notify(seen, args, kwargs, output)
            for hook in hooked:
                hook(seen, args, output)
        finally:
            if fresh:
                state.leaves.clear()
    if backward.passes:
        prepare_backward(backward, state, call_backward, output)
    elif call_backward is not None:
        backward.close(call_backward, state, output)
    if listeners.switched and not listeners.backward and is_grad_enabled():
        backward.watch(state, output)
    return output


def call_switched(
    backward: Backward,
    state: ThreadState,
    listeners: PathListeners,
    inner: Call,
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call the module in a plain forward where only changes of the running call are told.

    The thread state is in the call already; that it is left is told by who leaves it.
    """
    for notify in listeners.switched:
        notify(inner, FORWARD)
    if is_grad_enabled():
        backward.watch(state, (*args, *kwargs.values()) if len(args) != 1 or kwargs else args[0])
    output = run(*args, **kwargs)
    if backward.passes:
        prepare_backward(backward, state, None, output)
    if is_grad_enabled():
        backward.watch(state, output)
    if backward.attribution.threaded and inner[2] is state.base:
        backward.mark_origin(state, output)
    return output


def call_slow_path(
    backward: Backward,
    state: ThreadState,
    path: Path,
    outer: Call,
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Enter the call, `call_with_events`, and leave it, with everything that is rarely needed."""
    listeners = path.listeners or NOTHING
    if listeners is INTERNAL:
        return run(*args, **kwargs)
    attribution = backward.attribution
    before, before_task = state.call, state.task
    inner: Call | None = None
    task = graph_task()
    try:
        inner = state.push(path, outer, task)
        for notify in listeners.switched:
            # Where a hook of a backward calls a module, it is the hook's module that runs.
            if state.shown is None:
                notify(inner, FORWARD if task == NO_TASK else RECOMPUTE)
            else:
                notify(*attribution.locate())
        output = call_with_events(backward, state, listeners, path.module(), run, args, kwargs)
    finally:
        state.call, state.task = before, before_task
        if inner is not None:
            state.pop(inner, before, before_task, outer)
        for notify in listeners.switched:
            if before[2] is not None and before_task == NO_TASK == task and state.shown is None:
                notify(before, FORWARD)
            else:
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
