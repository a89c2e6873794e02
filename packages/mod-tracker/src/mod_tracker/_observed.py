"""Edge: a module call that somebody listens to - forward events, and what backward events need.

An exception of a listener goes to the caller of the module, as one of the module's own hooks
would; the lane is left clean in any case. Listeners told of the entry are told of the exit, with
output None if the call failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import is_grad_enabled, nn

from ._backward import Edge, edges_of, serials
from ._engine import TRANSPARENT, Engine
from ._lane import Lane
from ._listeners import NOTHING, Watch
from ._record import Call, Path
from ._torch_compat import NO_TASK, graph_task


def observe(
    engine: Engine,
    lane: Lane,
    path: Path,
    outer: Call,
    proceed: Any,
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call the module with everything its listeners asked for.

    `Visit` in two halves, around the call of `proceed`, without an object for it.
    """
    watch = path.watch
    if watch is TRANSPARENT:
        return proceed(module, *args, **kwargs)
    if watch is None:
        watch = NOTHING
    before, before_task = lane.call, lane.task
    call = lane.push(path, outer, graph_task())
    told, output = NOTHING, None
    seen = path.module()
    try:
        serial, edges = announce(engine, watch, call, seen, args, kwargs)
        told = watch
        output = proceed(module, *args, **kwargs)
    finally:
        try:
            for notify in told.post_forward:
                notify(call, seen, args, kwargs, output)
        finally:
            lane.pop(before, before_task, outer)
            for notify in watch.switched:
                notify(*engine.locate())
    prepare_backward(engine, lane, call, serial, edges, output)
    return output


def announce(
    engine: Engine,
    watch: Watch,
    call: Call,
    module: nn.Module | None,
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[int, Sequence[Edge] | None]:
    """Tell that a call begins.

    Returns:
        Its serial, and the gradient edges of its inputs; None if nobody asks for its backward.
    """
    serial, edges = -1, None
    if watch.backward and is_grad_enabled():
        serial = next(serials)
        edges = edges_of((*args, *kwargs.values()) if kwargs else args)
    for notify in watch.switched:
        notify(*engine.locate())
    for notify in watch.pre_forward:
        notify(call, module, args, kwargs)
    return serial, edges


def prepare_backward(
    engine: Engine,
    lane: Lane,
    call: Call,
    serial: int,
    edges: Sequence[Edge] | None,
    output: Any,
) -> None:
    """Attach to the graph what a call that has returned needs for its backward."""
    if engine.backward.runs and graph_task() == NO_TASK:
        engine.backward.forget_failed(lane.thread)
    if edges is not None:
        engine.backward.attach(call, edges, output, serial)
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
        self.serial, self.edges = announce(
            self.engine, watch, self.call, self.path.module(), self.args, {}
        )
        self.watch = watch

    def end(self, output: Any, *, ended: bool) -> None:
        """Tell that the call ends, and leave it; `ended` is False if the module did not return."""
        lane, engine = self.lane, self.engine
        if self.path.watch is TRANSPARENT:
            return
        try:
            for notify in self.watch.post_forward:
                notify(self.call, self.path.module(), self.args, {}, output)
        finally:
            lane.pop(self.before, self.before_task, self.outer)
            for notify in self.watch.switched:
                notify(*engine.locate())
        if ended and self.watch is not NOTHING:
            prepare_backward(engine, lane, self.call, self.serial, self.edges, output)
