"""Edge: a module call that somebody listens to - forward events, and what backward events need.

Whatever the module or a listener raises goes to the caller of the module, and leaves the lane
clean; which listeners may raise, `_subscription` says. Listeners told of the entry are told of the
exit, with output None if the call failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import is_grad_enabled, nn

from ._backward import Backward, Span
from ._lane import Lane
from ._listeners import NOTHING, TRANSPARENT, Watch
from ._record import Call, Path
from ._torch_compat import NO_TASK, graph_task


def tell(
    backward: Backward,
    lane: Lane,
    watch: Watch,
    seen: nn.Module | None,
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call the module, by `run`, between its events. The lane is in the call already."""
    fresh = not lane.leaves
    told, span, output = NOTHING, None, None
    try:
        if watch.backward and is_grad_enabled():
            span = backward.open(lane, args, kwargs)
        for notify in watch.pre_forward:
            notify(seen, args, kwargs)
        for hook in watch.pre_hook:
            hook(seen, args)
        told = watch
        output = run(*args, **kwargs)
    finally:
        try:
            for notify in told.post_forward:
                notify(seen, args, kwargs, output)
            for hook in told.post_hook:
                hook(seen, args, output)
        finally:
            if fresh:
                lane.leaves.clear()
    if backward.runs:
        prepare_backward(backward, lane, span, output)
    elif span is not None:
        backward.close(span, lane, output)
    return output


def observe(
    backward: Backward,
    lane: Lane,
    path: Path,
    outer: Call,
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Enter the call, `tell`, and leave it, with everything that is rarely needed.

    The two halves of a `Visit`, around the call of `run`, without an object for it.
    """
    watch = path.watch or NOTHING
    if watch is TRANSPARENT:
        return run(*args, **kwargs)
    engine = backward.engine
    before, before_task = lane.call, lane.task
    inner: Call | None = None
    try:
        inner = lane.push(path, outer, graph_task())
        for notify in watch.switched:
            notify(*engine.locate())
        output = tell(backward, lane, watch, path.module(), run, args, kwargs)
    finally:
        lane.call, lane.task = before, before_task
        if inner is not None:
            lane.pop(inner, before, before_task, outer)
        for notify in watch.switched:
            notify(*engine.locate())
    mark_origin(backward, lane, output)
    return output


def prepare_backward(backward: Backward, lane: Lane, span: Span | None, output: Any) -> None:
    """Attach to the graph what a call that has returned needs for its backward."""
    if backward.runs and graph_task() == NO_TASK:
        backward.forget_failed(lane.thread)
    if span is not None:
        backward.close(span, lane, output)


def mark_origin(backward: Backward, lane: Lane, output: Any) -> None:
    """Note, for other threads, where a backward through the output of an outermost call began."""
    if backward.engine.threaded and (lane.call is lane.base or graph_task() != lane.task):
        backward.mark_origin(lane, output)


class Visit:
    """A call entered and left by two separate hooks.

    Attributes:
        lane: of the thread.
        module: what is called.
        frame: `id` of the frame that runs the two hooks.
        before: what ran until the call was entered, and `before_task` its backward.
        ending: whether its end is being told.
    """

    def __init__(
        self,
        backward: Backward,
        lane: Lane,
        path: Path,
        outer: Call,
        module: nn.Module,
        args: tuple,
        *,
        frame: int,
    ) -> None:
        self.lane, self.module, self.frame = lane, module, frame
        self.before, self.before_task = lane.call, lane.task
        self.ending = False
        self._backward, self._path, self._outer, self._args = backward, path, outer, args
        self._inner: Call | None = None
        self._told = NOTHING
        self._fresh = False
        self._span: Span | None = None

    def begin(self) -> None:
        """Enter the call and tell that it begins."""
        lane, engine, path = self.lane, self._backward.engine, self._path
        self._inner = lane.push(path, self._outer, graph_task())
        watch = path.watch or NOTHING
        self._fresh = not lane.leaves
        if watch.backward and is_grad_enabled():
            self._span = self._backward.open(lane, self._args, {})
        for notify in watch.switched:
            notify(*engine.locate())
        for notify in watch.pre_forward:
            notify(path.module(), self._args, {})
        for hook in watch.pre_hook:
            hook(path.module(), self._args)
        self._told = watch

    def end(self, output: Any, *, ended: bool) -> None:
        """Tell that the call ends, and leave it; `ended` is False if the module did not return."""
        lane, engine, path = self.lane, self._backward.engine, self._path
        self.ending = True
        try:
            for notify in self._told.post_forward:
                notify(path.module(), self._args, {}, output)
            for hook in self._told.post_hook:
                hook(path.module(), self._args, output)
        finally:
            lane.call, lane.task = self.before, self.before_task
            if self._fresh:
                lane.leaves.clear()
            if self._inner is not None:
                lane.pop(self._inner, self.before, self.before_task, self._outer)
            for notify in (path.watch or NOTHING).switched:
                notify(*engine.locate())
        if ended and self._inner is not None:
            prepare_backward(self._backward, lane, self._span, output)
            mark_origin(self._backward, lane, output)
