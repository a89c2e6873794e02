"""Edge: the only place that patches `nn.Module.__call__`, or registers global forward hooks.

Note [Owning the patch]
Rule 1: every time a tracker is entered it puts a new layer around whatever is there. A layer is
        never used again: while it is somewhere in the chain, putting it on top would close a ring.
Rule 2: a tracker that leaves makes its layer inactive: it then passes calls on and nothing else.
        Inactive layers on top, or between layers of ours, are taken out, so trackers may leave in
        any order and the last one brings back exactly the object that was there.
Rule 3: a layer below a foreign patch stays, inactive, for that patch may call it. If that patch
        goes by putting our layer back on top, the next call through the layer takes it off.
Rule 4: a layer that a foreign patch replaced, instead of wrapping it, is never put back.
Rule 5: while torch.compile traces, a layer is one branch that Dynamo folds away, so compiled code
        contains nothing of it and has no guard on it.
Rule 6: a foreign patch may carry the attributes of the layer it wraps, as `functools.wraps` has
        it. A function is our layer only if the layer says so, too.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ._backward import Backward
from ._listeners import TRANSPARENT
from ._observed import Visit, observe, tell
from ._torch_compat import SHORTCUT, graph_task, next_number

Proceed = Callable[..., Any]

_lock = threading.RLock()


class Layer:
    """One function around `nn.Module.__call__`.

    Attributes:
        active: whether its tracker is entered.
        below: what calls are passed on to.
        function: refers to the function, weakly: it holds the layer.
        rebind: tells the function of a new `below`.
    """

    __slots__ = ("active", "below", "function", "rebind")
    function: weakref.ref[Proceed]
    rebind: Callable[[Proceed], None]

    def __init__(self, below: Proceed) -> None:
        self.active = True
        self.below = below

    def rest_on(self, below: Proceed) -> None:
        """Leave out an inactive layer below this one."""
        self.below = below
        self.rebind(below)


class CallPatch:
    """Puts layers around `nn.Module.__call__`. See Note [Owning the patch]."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        self._layer: Layer | None = None

    def install(self) -> None:
        """Put a layer on top."""
        with _lock:
            take_out_inactive()
            self._layer = layer = Layer(nn.Module.__call__)
            function = tracked(layer, self._backward)
            function.mod_tracker_layer = layer  # type: ignore[attr-defined]
            layer.function = weakref.ref(function)
            nn.Module.__call__ = function  # type: ignore[method-assign]

    def remove(self) -> None:
        """Make the layer inactive, and take it out if it can be."""
        with _lock:
            if self._layer is not None:
                self._layer.active = False
                self._layer = None
            take_out_inactive()


def take_out_inactive() -> None:
    """Take inactive layers off the top of `nn.Module.__call__`, and from between active ones."""
    with _lock:
        layer = layer_of(nn.Module.__call__)
        while layer is not None and not layer.active:
            nn.Module.__call__ = layer.below  # type: ignore[method-assign]
            layer = layer_of(layer.below)
        while layer is not None:
            below = layer_of(layer.below)
            if below is not None and not below.active:
                layer.rest_on(below.below)
            else:
                layer = below


def layer_of(function: Proceed) -> Layer | None:
    """Return the layer whose function this is; None if it is not one of ours. See Rule 6."""
    layer: Layer | None = getattr(function, "mod_tracker_layer", None)
    return layer if layer is not None and layer.function() is function else None


def tracked(layer: Layer, backward: Backward) -> Proceed:
    """Return a function to be called like `layer.below` that keeps the engine's lanes up to date.

    The common case writes `Lane.push` and `Lane.pop` out: calling them would double the cost. So
    would torch's own `__call__`; the choice it makes is made here if `SHORTCUT` says so.
    """
    proceed = layer.below
    engine = backward.engine
    local, open_lane = engine.local, engine.open_lane
    is_compiling = torch.compiler.is_compiling
    shortcut, limit = proceed is SHORTCUT, engine.limit

    def rebind(below: Proceed) -> None:
        nonlocal proceed, shortcut
        proceed = below
        shortcut = below is SHORTCUT

    layer.rebind = rebind

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return proceed(module, *args, **kwargs)
        if not layer.active:
            take_out_inactive()
            return proceed(module, *args, **kwargs)
        try:
            lane = local.lane
        except AttributeError:
            lane = open_lane()
        task, before = graph_task(), lane.call
        outer = before if task == lane.task else engine.base_of(lane, module, task)
        path = outer[0].children.get(id(module)) or engine.grow(lane, outer, module)
        watch = path.watch
        if watch is not None or task != lane.task:
            plain = shortcut and module._compiled_call_impl is None
            run = module._call_impl if plain else MethodType(proceed, module)
            if watch is None or watch.apart or task != lane.task:
                return observe(backward, lane, path, outer, run, args, kwargs)
        record = lane.record
        starts, calls = record.starts, record.calls
        inner = before
        try:
            number, start = next_number(), lane.number
            if number != start:
                if start >= 0 and len(starts) <= limit:
                    starts.append(start)
                    calls.append(before)
                    lane.number = number
                else:
                    lane.flush(number, before)
            index = path.last[1]
            path.last = lane.call = inner = (path, index + 1 if task < 0 else index, outer)
            if watch is not None:
                return tell(backward, lane, watch, path.module(), run, args, kwargs)
            if shortcut and module._compiled_call_impl is None:
                return module._call_impl(*args, **kwargs)
            return proceed(module, *args, **kwargs)
        finally:
            # First, so that an interrupt in what follows leaves the lane clean.
            lane.call = before
            number, start = next_number(), lane.number
            if number != start:
                if start >= 0 and len(starts) <= limit:
                    starts.append(start)
                    calls.append(inner)
                    lane.number = number
                else:
                    lane.flush(number, inner)

    return call


class GlobalHooks:
    """The other way: torch's global forward hooks instead of the patch.

    Slower, blind to keyword arguments, and what a module's own hooks do is charged to its caller.
    torch does not run these hooks after a KeyboardInterrupt or another exception that is not an
    `Exception`. A call left open in this way has ended when the frame that ran its hooks is not
    on the Python stack any more; it is closed when a module is entered, or the thread is asked
    where it is, whichever comes first.
    """

    def __init__(self, backward: Backward) -> None:
        self.active = False
        self._backward, self._engine = backward, backward.engine
        self._handles: list[Any] = []
        self._engine.settle = self.settle

    def install(self) -> None:
        """Register the two global hooks."""
        self.settle()
        self.active = True
        self._handles.append(register_module_forward_pre_hook(self._enter))
        self._handles.append(register_module_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Remove the two global hooks, and close what is open in this thread."""
        self.active = False
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        self._close(0)

    def settle(self) -> None:
        """Close the calls of this thread that have ended without their hook."""
        if self._opened():
            self._close_ended(sys._getframe(1))

    def _opened(self) -> list[Visit]:
        local = self._engine.local
        if not hasattr(local, "opened"):
            local.opened = []
        return local.opened

    def _close_ended(self, frame: FrameType | None) -> None:
        # Calls nest, so all inside the first that has ended have ended, too.
        running = set()
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        visits = self._opened()
        ended = (at for at, visit in enumerate(visits) if visit.frame not in running)
        self._close(next(ended, len(visits)))

    def _close(self, end: int) -> None:
        visits = self._opened()
        while len(visits) > end and not visits[-1].ending:
            self._end(visits, None, ended=False)

    def _end(self, visits: list[Visit], output: Any, *, ended: bool) -> None:
        visit = visits[-1]
        lane = visit.lane
        try:
            visit.end(output, ended=ended)
        finally:
            lane.call, lane.task = visit.before, visit.before_task
            del visits[visits.index(visit) :]

    def _enter(self, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling() or not self.active:
            return
        frame = sys._getframe(1)
        # The frame itself may be where that of an ended call was.
        self._close_ended(frame.f_back)
        engine = self._engine
        lane = engine.lane() or engine.open_lane()
        task = graph_task()
        outer = lane.call if task == lane.task else engine.base_of(lane, module, task)
        path = outer[0].children.get(id(module)) or engine.grow(lane, outer, module)
        if path.watch is not TRANSPARENT:
            visit = Visit(self._backward, lane, path, outer, module, args, frame=id(frame))
            self._opened().append(visit)
            visit.begin()

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.active:
            return
        visits, frame = self._opened(), id(sys._getframe(1))
        at = next((at for at, visit in enumerate(visits) if visit.frame == frame), -1)
        if at >= 0 and visits[at].module is module:
            self._close(at + 1)
            self._end(visits, output, ended=True)
