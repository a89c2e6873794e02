"""Edge: a module call that somebody listens to - forward events, and what backward events need.

Whatever the module or a listener raises goes to the caller of the module, and leaves the lane
clean; which listeners may raise, `_subscription` says. Listeners told of the entry are told of the
exit, with output None if the call failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import is_grad_enabled, nn

from ._backward import Span
from ._engine import Engine
from ._lane import Lane
from ._listeners import NOTHING, TRANSPARENT, Watch
from ._record import Call, Path
from ._torch_compat import NO_TASK, graph_task


def tell(
    engine: Engine,
    lane: Lane,
    watch: Watch,
    seen: nn.Module | None,
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call the module, by `run`, between its events. The lane is in the call already."""
    backward, fresh = engine.backward, not lane.leaves
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
        prepare_backward(engine, lane, span, output)
    elif span is not None:
        backward.close(span, lane, output)
    return output


def observe(
    engine: Engine,
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
    before, before_task = lane.call, lane.task
    try:
        lane.push(path, outer, graph_task())
        for notify in watch.switched:
            notify(*engine.locate())
        output = tell(engine, lane, watch, path.module(), run, args, kwargs)
    finally:
        lane.pop(before, before_task, outer)
        for notify in watch.switched:
            notify(*engine.locate())
    mark_origin(engine, lane, output)
    return output


def prepare_backward(engine: Engine, lane: Lane, span: Span | None, output: Any) -> None:
    """Attach to the graph what a call that has returned needs for its backward."""
    backward = engine.backward
    if backward.runs and graph_task() == NO_TASK:
        backward.forget_failed(lane.thread)
    if span is not None:
        backward.close(span, lane, output)


def mark_origin(engine: Engine, lane: Lane, output: Any) -> None:
    """Note, for other threads, where a backward through the output of an outermost call began."""
    if engine.threaded and (lane.call is lane.base or graph_task() != lane.task):
        engine.backward.mark_origin(lane, output)


@dataclass
class Visit:
    """A call entered and left by two separate hooks."""

    engine: Engine
    lane: Lane
    path: Path
    outer: Call
    module: nn.Module
    args: tuple

    def begin(self) -> None:
        """Enter the call and tell that it begins."""
        lane = self.lane
        self.before, self.before_task = lane.call, lane.task
        self.watch = NOTHING
        if self.path.watch is TRANSPARENT:
            self.call = self.before
            return
        self.call = lane.push(self.path, self.outer, graph_task())
        watch = self.path.watch or NOTHING
        self.fresh, self.span = not lane.leaves, None
        if watch.backward and is_grad_enabled():
            self.span = self.engine.backward.open(lane, self.args, {})
        for notify in watch.switched:
            notify(*self.engine.locate())
        for notify in watch.pre_forward:
            notify(self.path.module(), self.args, {})
        for hook in watch.pre_hook:
            hook(self.path.module(), self.args)
        self.watch = watch

    def end(self, output: Any, *, ended: bool) -> None:
        """Tell that the call ends, and leave it; `ended` is False if the module did not return."""
        lane, engine = self.lane, self.engine
        if self.path.watch is TRANSPARENT:
            return
        try:
            for notify in self.watch.post_forward:
                notify(self.path.module(), self.args, {}, output)
            for hook in self.watch.post_hook:
                hook(self.path.module(), self.args, output)
        finally:
            lane.pop(self.before, self.before_task, self.outer)
            if self.fresh:
                lane.leaves.clear()
            for notify in self.watch.switched:
                notify(*engine.locate())
        if ended and self.watch is not NOTHING:
            prepare_backward(engine, lane, self.span, output)
            mark_origin(engine, lane, output)
